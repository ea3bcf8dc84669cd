// Division-free rounding to a grid of eight magnitudes, exactly as dividing and comparing would.
//
// The reference computes q = fl(v / d) in float32 and counts the bounds b that q lies beyond. Rounding is monotone, so
// that is a condition on v alone: fl(v / d) > b means v > d * (b + half an ulp of b), and fl(v / d) >= b means
// v >= d * (b - half an ulp): exactly half an ulp away the tie goes to b, whose mantissa is even. These products have at
// most 50 significant bits, so double holds them exactly. A level is then the number of `at` that v exceeds.
#pragma once

#include "numerics.h"

namespace {

// at[0..6]: the bounds between the eight levels; at[7]: the largest value that becomes zero, whose sign is lost.
struct Thresholds {
    float at[8];
};

enum class Ties { even, down };

constexpr float kE2m1Bounds[7] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};
constexpr float kInt4Bounds[7] = {0.5f, 1.5f, 2.5f, 3.5f, 4.5f, 5.5f, 6.5f};

// Largest float that is at most x (or below it): v > result is v > x (or v >= x) for every float v.
inline float float_at_most(double x, bool below) {
    if (x <= 0) return 0;
    const float nearest = static_cast<float>(x);
    const bool high = below ? nearest >= x : nearest > x;
    return high ? float_of(bits_of(nearest) - 1) : nearest;
}

inline double half_ulp(float bound) {
    return static_cast<double>(float_of(bits_of(bound) & 0x7f800000u)) / 16777216.0;
}

// For q = fl(v / divisor); bounds alternate between ties down and ties up, as nearest-even does on these grids.
inline Thresholds quotient_thresholds(const float (&bounds)[7], float divisor) {
    Thresholds result;
    for (int i = 0; i < 7; ++i) {
        const bool up = i & 1;
        const double bound = static_cast<double>(bounds[i]) + (up ? -half_ulp(bounds[i]) : half_ulp(bounds[i]));
        result.at[i] = float_at_most(divisor * bound, up && divisor > 0);
    }
    result.at[7] = float_at_most(divisor * 0x1p-150, false);
    return result;
}

// For q = v * 2^(127 - code), whose scaling rounds nothing near a bound; ties go down.
inline Thresholds power_thresholds(uint8_t code) {
    const double scale = __builtin_ldexp(1.0, code - 127);
    Thresholds result;
    for (int i = 0; i < 7; ++i) result.at[i] = float_at_most(scale * kE2m1Bounds[i], false);
    result.at[7] = float_at_most(scale * 0x1p-150, false);
    return result;
}

// How many of the seven bounds a value lies beyond.
inline int level_of(const Thresholds& t, float size) {
    int level = 0;
    for (int i = 0; i < 7; ++i) level += size > t.at[i];
    return level;
}

}  // namespace
