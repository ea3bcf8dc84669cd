// Block scales of NVFP4 by least squared error, as pipeline/formats/nvfp4_search does, candidate for candidate.
//
// Errors are float32 sums in the order of numpy's pairwise summation (eight partial sums), because ties and near ties
// between candidates are decided by their last bit.
#pragma once

#include "kernels.h"
#include "maps.h"

namespace {

// Squared error of one magnitude under a block scale, over weight_scale_2 squared.
inline float squared_error(float size, float divisor, float scale) {
    const float wanted = size / divisor;
    const float rest = (wanted - nearest_e2m1(wanted)) * scale;
    return rest * rest;
}

// The code of least error among those that may serve; `error_of(code)` is the block's error under it.
template <class ErrorOf>
inline uint8_t least_error_code(float top, const native::Nvfp4& p, ErrorOf error_of) {
    const int start = amax_scale_code(top, p.scale_2);
    const float units = top / p.scale_2;
    const int first = start - p.reach < 1 ? 1 : start - p.reach;
    const int last = start + p.reach > p.last_code ? p.last_code : start + p.reach;
    float best = error_of(start);
    int code = start;
    for (int candidate = first; candidate <= last; ++candidate) {
        const float scale = from_e4m3(static_cast<uint32_t>(candidate));
        if (!(scale < 4 * units)) break;
        const float clipped = larger(units - kE2m1Max * scale, 0.0f);
        if (!(clipped * clipped < best)) continue;
        const float error = error_of(candidate);
        if (error < best) {
            best = error;
            code = candidate;
        }
    }
    return static_cast<uint8_t>(code);
}

// The better of amax / 6 and amax / 4, in ModelOpt's order of operations.
template <class ErrorOf>
inline uint8_t four_over_six_code(float top, const native::Nvfp4& p, ErrorOf error_of) {
    if (!(top > 0)) return kE4m3One;
    const auto code_of = [&](float factor) {
        const float scale = factor * top / kE2m1Max;
        return block_scale_code((scale == 0 ? 1.0f : scale) * p.unit / (p.amax / kE2m1Max));
    };
    const uint8_t six = code_of(1.0f), four = code_of(1.5f);
    return error_of(four) < error_of(six) ? four : six;
}

template <class ErrorOf>
inline uint8_t searched_code(float top, const native::Nvfp4& p, ErrorOf error_of) {
    switch (p.search) {
        case native::Search::four_over_six: return four_over_six_code(top, p, error_of);
        case native::Search::least_error: return least_error_code(top, p, error_of);
        default: return amax_scale_code(top, p.scale_2);
    }
}

}  // namespace
