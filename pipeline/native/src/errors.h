// Errors of a converted weight against its source, both as stored; see `RowErrors`.
//
// The order of the float64 sums is fixed, so that reports are equal byte for byte on every machine: element i of a row
// goes to lane i mod 16, each lane is summed from left to right, and at the end lanes are folded in halves (i and i + 8,
// then i and i + 4, ...). `pipeline/formats/row_errors.py` is the same in numpy.
#pragma once

#include "source.h"

namespace {

// Vectors of GCC and clang: the compiler lays them on whatever registers the level has.
using Doubles = double __attribute__((vector_size(64)));
using Floats = float __attribute__((vector_size(32)));
using Ints = int32_t __attribute__((vector_size(32)));
using Longs = int64_t __attribute__((vector_size(64)));

constexpr int kHalf = 8;  // lanes of one vector; a row has two

struct Lanes {
    Doubles signal = {}, noise = {};
    Longs most = {};  // magnitudes as bits: ordered as the numbers are, NaN on top
    Ints clipped = {};

    // Every second stretch of 8 elements, of 128.
    void add_segment(const float* wanted, const float* got, float limit) {
        for (int i = 0; i < kSegment; i += 2 * kHalf) add(wanted + i, got + i, limit);
    }

    void add(const float* wanted, const float* got, float limit) {
        Floats wide_wanted, wide_got;
        std::memcpy(&wide_wanted, wanted, sizeof wide_wanted);
        std::memcpy(&wide_got, got, sizeof wide_got);
        const Doubles w = __builtin_convertvector(wide_wanted, Doubles);
        const Doubles error = __builtin_convertvector(wide_got, Doubles) - w;
        const Longs size = reinterpret_cast<Longs>(error) & INT64_MAX;
        const Floats magnitude = reinterpret_cast<Floats>(reinterpret_cast<Ints>(wide_wanted) & INT32_MAX);
        signal += w * w;
        noise += error * error;
        most = size > most ? size : most;
        clipped -= magnitude > limit;
    }
};

inline double folded(const Doubles& a, const Doubles& b) {
    double lanes[kHalf];
    for (int i = 0; i < kHalf; ++i) lanes[i] = a[i] + b[i];
    for (int half = kHalf / 2; half; half /= 2) {
        for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    }
    return lanes[0];
}

inline void row_errors(const Tensor& wanted, const Tensor& got, double limit, const native::RowErrors& out) {
    alignas(64) float w[kSegment] = {}, g[kSegment] = {};
    const float bound = float_at_most(limit, false);  // the same comparison, in float32
    for (int64_t row = 0; row < wanted.n; ++row) {
        Lanes low, high;
        for (int64_t column = 0; column < wanted.k; column += kSegment) {
            const int count = segment_at(column, wanted.k);
            decode(wanted, row, column, count, w);
            decode(got, row, column, count, g);
            for (int i = count; i < kSegment; ++i) w[i] = g[i] = 0;
            low.add_segment(w, g, bound);
            high.add_segment(w + kHalf, g + kHalf, bound);
        }
        int64_t most = 0, clipped = 0;
        for (int i = 0; i < kHalf; ++i) {
            most = low.most[i] > most ? low.most[i] : most;
            most = high.most[i] > most ? high.most[i] : most;
            clipped += low.clipped[i] + high.clipped[i];
        }
        out.signal[row] = folded(low.signal, high.signal);
        out.noise[row] = folded(low.noise, high.noise);
        std::memcpy(&out.max_abs[row], &most, sizeof most);
        out.clipped[row] = clipped;
    }
}

}  // namespace
