// The weight that stored tensors stand for, 128 elements of a row at a time: what `dequantize` of each format computes.
#pragma once

#include "kernels.h"
#include "numerics.h"

namespace {

using native::Layout;
using native::Tensor;

constexpr int kSegment = 128;

// E2M1 code (4 bits) to its value.
inline float from_e2m1(uint32_t code) {
    const uint32_t m = code & 7u;
    const float small = static_cast<float>(static_cast<int32_t>(m)) * 0.5f;
    const float large = float_of(((m >> 1) + 126u) << 23 | (m & 1u) << 22);
    return float_of(bits_of(m < 2 ? small : large) | (code & 8u) << 28);
}

inline void decode_codes(const uint8_t* codes, int count, float scale, float* out) {
    for (int i = 0; i < count; ++i) out[i] = from_signed_e4m3(codes[i]) * scale;
}

// Nibbles, the even element in the low one, times a factor for each `group`.
inline void decode_nibbles(const uint8_t* packed, int count, const float* factors, int group, float* out) {
    for (int i = 0; i < count / 2; ++i) {
        out[2 * i] = from_e2m1(packed[i] & 0xfu);
        out[2 * i + 1] = from_e2m1(packed[i] >> 4);
    }
    for (int g = 0; g * group < count; ++g) {
        const float factor = factors[g];
        for (int i = g * group; i < (g + 1) * group; ++i) out[i] *= factor;
    }
}

inline void decode_nvfp4(const Tensor& t, int64_t row, int64_t column, int count, float* out) {
    const auto* packed = static_cast<const uint8_t*>(t.weight) + (row * t.k + column) / 2;
    const auto* scales = static_cast<const uint8_t*>(t.scale) + (row * t.k + column) / t.group;
    float factors[kSegment / 16];
    for (int g = 0; g < count / t.group; ++g) factors[g] = from_signed_e4m3(scales[g]) * t.scale_2;
    t.group == 16 ? decode_nibbles(packed, count, factors, 16, out) : decode_nibbles(packed, count, factors, 32, out);
}

inline void decode_mx(const Tensor& t, int64_t row, int64_t column, int count, float* out) {
    const auto* weight = static_cast<const uint8_t*>(t.weight);
    const auto* scales = static_cast<const uint8_t*>(t.scale) + (row * t.k + column) / 32;
    float factors[kSegment / 32];
    for (int g = 0; g < count / 32; ++g) factors[g] = from_e8m0(scales[g]);
    if (t.layout == Layout::mxfp4) {
        decode_nibbles(weight + (row * t.k + column) / 2, count, factors, 32, out);
        return;
    }
    const uint8_t* codes = weight + row * t.k + column;
    for (int g = 0; g < count / 32; ++g) decode_codes(codes + 32 * g, 32, factors[g], out + 32 * g);
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
        case Layout::fp8: return decode_codes(codes, count, t.scale_2, out);
        case Layout::fp8_channel: return decode_codes(codes, count, scales[row], out);
        case Layout::fp8_block: {
            const int64_t across = (t.k + kBlock - 1) / kBlock;
            return decode_codes(codes, count, scales[row / kBlock * across + column / kBlock], out);
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
