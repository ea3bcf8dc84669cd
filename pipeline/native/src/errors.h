// Errors of a converted weight against its source, both as stored; see `RowErrors`.
//
// The order of the float64 sums is fixed, so that reports are equal byte for byte on every machine: 128 consecutive
// elements of a row are folded in halves (i and i + 64, then i and i + 32, ...), a shorter stretch filled up with zeros,
// and these sums are added from left to right. `row_errors` in pipeline/formats/fast.py is the same in numpy.
#pragma once

#include "source.h"

namespace {

inline double folded(double* terms) {
    for (int half = kSegment / 2; half; half /= 2) {
        for (int i = 0; i < half; ++i) terms[i] += terms[i + half];
    }
    return terms[0];
}

inline void row_errors(const Tensor& wanted, const Tensor& got, double limit, const native::RowErrors& out) {
    alignas(64) float w[kSegment] = {}, g[kSegment] = {};
    for (int64_t row = 0; row < wanted.n; ++row) {
        double signal = 0, noise = 0, most = 0;
        int64_t clipped = 0;
        bool broken = false;
        for (int64_t column = 0; column < wanted.k; column += kSegment) {
            const int count = segment_at(column, wanted.k);
            decode(wanted, row, column, count, w);
            decode(got, row, column, count, g);
            for (int i = count; i < kSegment; ++i) w[i] = g[i] = 0;
            alignas(64) double squares[kSegment], errors[kSegment];
            int beyond = 0;
            for (int i = 0; i < kSegment; ++i) {
                const double x = w[i], e = static_cast<double>(g[i]) - x, size = e < 0 ? -e : e;
                squares[i] = x * x;
                errors[i] = e * e;
                most = size > most ? size : most;
                broken |= e != e;
                beyond += (x < 0 ? -x : x) > limit;
            }
            clipped += beyond;
            signal += folded(squares);
            noise += folded(errors);
        }
        out.signal[row] = signal;
        out.noise[row] = noise;
        out.max_abs[row] = broken ? noise : most;
        out.clipped[row] = clipped;
    }
}

}  // namespace
