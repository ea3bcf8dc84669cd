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

// Magnitude of an error as an integer: ordered as magnitudes are, NaN on top.
inline int64_t magnitude_bits(double x) {
    int64_t u;
    std::memcpy(&u, &x, sizeof u);
    return u & INT64_MAX;
}

struct Sums {
    double signal = 0, noise = 0;
    int64_t most = 0, clipped = 0;
};

// Adds 128 elements. Loops are kept apart so that compilers vectorise each.
inline void add_segment(const float* wanted, const float* got, double limit, Sums& sums) {
    alignas(64) double terms[kSegment], error[kSegment];
    int64_t beyond = 0, most = 0;
    for (int i = 0; i < kSegment; ++i) {
        const double w = wanted[i];
        error[i] = static_cast<double>(got[i]) - w;
        terms[i] = w * w;
    }
    for (int i = 0; i < kSegment; ++i) beyond += static_cast<double>(magnitude(wanted[i])) > limit ? 1 : 0;
    sums.signal += folded(terms);
    for (int i = 0; i < kSegment; ++i) {
        const int64_t size = magnitude_bits(error[i]);
        most = size > most ? size : most;
        terms[i] = error[i] * error[i];
    }
    sums.noise += folded(terms);
    sums.most = most > sums.most ? most : sums.most;
    sums.clipped += beyond;
}

inline void row_errors(const Tensor& wanted, const Tensor& got, double limit, const native::RowErrors& out) {
    alignas(64) float w[kSegment] = {}, g[kSegment] = {};
    for (int64_t row = 0; row < wanted.n; ++row) {
        Sums sums;
        for (int64_t column = 0; column < wanted.k; column += kSegment) {
            const int count = segment_at(column, wanted.k);
            decode(wanted, row, column, count, w);
            decode(got, row, column, count, g);
            for (int i = count; i < kSegment; ++i) w[i] = g[i] = 0;
            add_segment(w, g, limit, sums);
        }
        out.signal[row] = sums.signal;
        out.noise[row] = sums.noise;
        std::memcpy(&out.max_abs[row], &sums.most, sizeof sums.most);
        out.clipped[row] = sums.clipped;
    }
}

}  // namespace
