// The weight that stored tensors stand for, 128 elements of a row at a time: what `dequantize` of each format computes.
#pragma once

#include "kernels.h"
#include "maps.h"

namespace {

using native::Layout;
using native::Tensor;

constexpr int kSegment = 128;

inline void decode_nvfp4(const Tensor& t, int64_t row, int64_t column, int count, float* out) {
    const auto* packed = static_cast<const uint8_t*>(t.weight) + (row * t.k + column) / 2;
    const auto* scales = static_cast<const uint8_t*>(t.scale) + (row * t.k + column) / t.group;
    float factors[kSegment / 16];
    plain_e4m3_values(scales, count / t.group, t.scale_2, factors);
    for (int at = 0; at < count; at += 16) e2m1_values<16>(packed + at / 2, factors[at / t.group], out + at);
}

inline void decode_mx(const Tensor& t, int64_t row, int64_t column, int count, float* out) {
    const auto* weight = static_cast<const uint8_t*>(t.weight);
    const auto* scales = static_cast<const uint8_t*>(t.scale) + (row * t.k + column) / 32;
    const int64_t first = row * t.k + column;
    for (int at = 0; at < count; at += 32) {
        const float factor = from_e8m0(scales[at / 32]);
        if (t.layout == Layout::mxfp4) {
            e2m1_values<32>(weight + (first + at) / 2, factor, out + at);
        } else {
            e4m3_values(weight + first + at, 32, factor, out + at);
        }
    }
}

// Two rows a byte, two's complement; int4 * weight_scale * pre_quant_scale.
inline void decode_int4(const Tensor& t, int64_t row, int64_t column, int count, float* out) {
    const uint8_t* packed = static_cast<const uint8_t*>(t.weight) + row / 2 * t.k + column;
    const float scale = static_cast<const float*>(t.scale)[(row * t.k + column) / kSegment];
    const int shift = row % 2 ? 4 : 0;
    for (int i = 0; i < count; ++i) {
        const int32_t code = (packed[i] >> shift & 0xf) ^ 8;
        out[i] = static_cast<float>(code - 8) * scale;
    }
    if (!t.factors) return;
    for (int i = 0; i < count; ++i) out[i] *= from_bf16(t.factors[column + i]);
}

inline void decode_plain(const Tensor& t, int64_t at, int count, float* out) {
    if (t.layout == Layout::f32) {
        std::memcpy(out, static_cast<const float*>(t.weight) + at, sizeof(float) * static_cast<unsigned>(count));
        return;
    }
    const uint16_t* half = static_cast<const uint16_t*>(t.weight) + at;
    if (t.layout == Layout::bf16) {
        for (int i = 0; i < count; ++i) out[i] = from_bf16(half[i]);
    } else {
        for (int i = 0; i < count; ++i) out[i] = from_f16(half[i]);
    }
}

// Elements [column, column + count) of a row in float32; `column` is a multiple of 128 and `count` at most 128.
inline void decode(const Tensor& t, int64_t row, int64_t column, int count, float* out) {
    const auto* codes = static_cast<const uint8_t*>(t.weight) + row * t.k + column;
    const auto* scales = static_cast<const float*>(t.scale);
    switch (t.layout) {
        case Layout::fp8: return e4m3_values(codes, count, t.scale_2, out);
        case Layout::fp8_channel: return e4m3_values(codes, count, scales[row], out);
        case Layout::fp8_block: {
            const int64_t across = (t.k + kBlock - 1) / kBlock;
            return e4m3_values(codes, count, scales[row / kBlock * across + column / kBlock], out);
        }
        case Layout::nvfp4: return decode_nvfp4(t, row, column, count, out);
        case Layout::mxfp8:
        case Layout::mxfp4: return decode_mx(t, row, column, count, out);
        case Layout::int4: return decode_int4(t, row, column, count, out);
        default: return decode_plain(t, row * t.k + column, count, out);
    }
}

inline int segment_at(int64_t column, int64_t end) {
    return end - column < kSegment ? static_cast<int>(end - column) : kSegment;
}

// A stretch of a row in BF16; the stored one where it is in BF16.
inline const uint16_t* bf16_values(const Tensor& t, int64_t row, int64_t column, int count, uint16_t* buffer) {
    if (t.layout == Layout::bf16) return static_cast<const uint16_t*>(t.weight) + row * t.k + column;
    for (int at = 0; at < count; at += kSegment) {
        float values[kSegment];
        const int part = segment_at(at, count);
        decode(t, row, column + at, part, values);
        for (int i = 0; i < part; ++i) buffer[at + i] = to_bf16(values[i]);
    }
    return buffer;
}

}  // namespace
