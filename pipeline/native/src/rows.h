// From any other source, row by row: weights as BF16 bits, or as float32 where the arithmetic needs it.
#pragma once

#include "tile.h"

namespace {

constexpr int kChunk = 1024;  // elements of a row at a time

inline int chunk_at(int64_t column, int64_t end) {
    return end - column < kChunk ? static_cast<int>(end - column) : kChunk;
}

// Calls visit(row, column, count, bf16 values) for stretches of all rows.
template <class Visit>
inline void for_each_chunk(const Tensor& t, Visit visit) {
    uint16_t buffer[kChunk];
    for (int64_t row = 0; row < t.n; ++row) {
        for (int64_t column = 0; column < t.k; column += kChunk) {
            const int count = chunk_at(column, t.k);
            visit(row, column, count, bf16_values(t, row, column, count, buffer));
        }
    }
}

inline uint16_t top_of(const uint16_t* values, int count) {
    uint16_t top = 0;
    for (int i = 0; i < count; ++i) {
        const uint16_t m = values[i] & 0x7fff;
        top = m > top ? m : top;
    }
    return top;
}

// Levels of G values by thresholds in BF16 (the largest BF16 number at most each), and their signs, as nibbles.
template <int G, Zero Z>
inline void level_nibbles(const uint16_t* values, const uint16_t (&at)[8], uint8_t* packed) {
    uint16_t nibble[G];
    for (int i = 0; i < G; ++i) {
        const uint16_t m = values[i] & 0x7fff;
        uint16_t level = 0;
        for (int j = 0; j < 7; ++j) level = static_cast<uint16_t>(level + (m > at[j]));
        const uint16_t sign = static_cast<uint16_t>(values[i] >> 12 & 8);
        const bool something = m > at[7];
        nibble[i] = static_cast<uint16_t>(level | (Z == Zero::plain ? (something ? sign : 0) : (something ? sign : 8)));
    }
    for (int i = 0; i < G / 2; ++i) packed[i] = static_cast<uint8_t>(nibble[2 * i] | nibble[2 * i + 1] << 4);
}

struct Bf16Thresholds {
    uint16_t at[8];
};

inline Bf16Thresholds in_bf16(const Thresholds& t) {
    Bf16Thresholds result;
    for (int i = 0; i < 8; ++i) result.at[i] = static_cast<uint16_t>(bits_of(t.at[i]) >> 16);
    return result;
}

template <int G>
inline uint8_t searched_bf16_code(const uint16_t* values, float top, const native::Nvfp4& p) {
    return searched_code(top, p, [&](int code) {
        const float scale = from_e4m3(static_cast<uint32_t>(code)), divisor = scale * p.scale_2;
        float error[G];
        for (int i = 0; i < G; ++i) error[i] = squared_error(from_bf16(values[i] & 0x7fff), divisor, scale);
        return pairwise_sum<G>([&](int i) { return error[i]; });
    });
}

template <int G>
void rows_to_nvfp4(const Tensor& t, const native::Nvfp4& p, uint8_t* weight, uint8_t* scale) {
    Bf16Thresholds thresholds[kCodes];
    for (uint32_t code = 0; code < kCodes; ++code) {
        thresholds[code] = in_bf16(quotient_thresholds(kE2m1Bounds, from_e4m3(code) * p.scale_2));
    }
    for_each_chunk(t, [&](int64_t row, int64_t column, int count, const uint16_t* values) {
        float tops[kChunk / G];
        uint8_t* keys = scale + (row * t.k + column) / G;
        uint8_t* packed = weight + (row * t.k + column) / 2;
        const int groups = count / G;
        for (int g = 0; g < groups; ++g) tops[g] = from_bf16(top_of(values + g * G, G));
        if (p.search == native::Search::amax) {
            for (int g = 0; g < groups; ++g) keys[g] = amax_scale_code(tops[g], p.scale_2);
        } else {
            for (int g = 0; g < groups; ++g) keys[g] = searched_bf16_code<G>(values + g * G, tops[g], p);
        }
        for (int g = 0; g < groups; ++g) {
            level_nibbles<G, Zero::plain>(values + g * G, thresholds[keys[g]].at, packed + g * (G / 2));
        }
    });
}

inline void rows_to_mxfp4(const Tensor& t, uint8_t* weight, uint8_t* scale) {
    Bf16Thresholds thresholds[256];
    for (int code = 0; code < 256; ++code) thresholds[code] = in_bf16(power_thresholds(static_cast<uint8_t>(code)));
    for_each_chunk(t, [&](int64_t row, int64_t column, int count, const uint16_t* values) {
        uint8_t* keys = scale + (row * t.k + column) / 32;
        uint8_t* packed = weight + (row * t.k + column) / 2;
        for (int g = 0; g < count / 32; ++g) {
            keys[g] = to_e8m0(from_bf16(top_of(values + g * 32, 32)) / kE2m1Max);
            level_nibbles<32, Zero::negative>(values + g * 32, thresholds[keys[g]].at, packed + g * 16);
        }
    });
}

inline void rows_to_mxfp8(const Tensor& t, uint8_t* weight, uint8_t* scale) {
    for_each_chunk(t, [&](int64_t row, int64_t column, int count, const uint16_t* values) {
        uint8_t* keys = scale + (row * t.k + column) / 32;
        uint8_t* out = weight + row * t.k + column;
        for (int g = 0; g < count / 32; ++g) {
            keys[g] = to_e8m0(from_bf16(top_of(values + g * 32, 32)) / kE4m3Max);
            const float power = from_e8m0(254u - keys[g]);
            for (int i = 32 * g; i < 32 * (g + 1); ++i) out[i] = to_signed_e4m3(from_bf16(values[i]) * power);
        }
    });
}

inline void rows_to_fp8(const Tensor& t, float scale, uint8_t* weight) {
    for_each_chunk(t, [&](int64_t row, int64_t column, int count, const uint16_t* values) {
        uint8_t* out = weight + row * t.k + column;
        for (int i = 0; i < count; ++i) out[i] = to_signed_e4m3(from_bf16(values[i]) / scale);
    });
}

// Each row twice: for its amax, then for its codes.
inline void rows_to_fp8_channel(const Tensor& t, uint8_t* weight, float* scale) {
    uint16_t buffer[kChunk];
    for (int64_t row = 0; row < t.n; ++row) {
        uint16_t top = 0;
        for (int64_t column = 0; column < t.k; column += kChunk) {
            const int count = chunk_at(column, t.k);
            const uint16_t m = top_of(bf16_values(t, row, column, count, buffer), count);
            top = m > top ? m : top;
        }
        const float wanted = from_bf16(top) / kE4m3Max, divisor = wanted == 0 ? 1.0f : wanted;
        scale[row] = divisor;
        for (int64_t column = 0; column < t.k; column += kChunk) {
            const int count = chunk_at(column, t.k);
            const uint16_t* values = bf16_values(t, row, column, count, buffer);
            uint8_t* out = weight + row * t.k + column;
            for (int i = 0; i < count; ++i) out[i] = to_signed_e4m3(from_bf16(values[i]) / divisor);
        }
    }
}

inline void rows_to_bf16(const Tensor& t, uint16_t* weight) {
    uint16_t buffer[kChunk];
    for (int64_t row = 0; row < t.n; ++row) {
        for (int64_t column = 0; column < t.k; column += kChunk) {
            const int count = chunk_at(column, t.k);
            uint16_t* out = weight + row * t.k + column;
            const uint16_t* values = bf16_values(t, row, column, count, out);
            if (values != out) std::memcpy(out, values, 2u * static_cast<unsigned>(count));
        }
    }
}

// Groups of 128; two rows share bytes, the even one in the low nibbles.
inline void rows_to_int4(const Tensor& t, uint8_t* weight, float* scale) {
    uint16_t buffer[kSegment];
    for (int64_t row = 0; row < t.n; ++row) {
        for (int64_t column = 0; column < t.k; column += kSegment) {
            const uint16_t* values = bf16_values(t, row, column, kSegment, buffer);
            const float wanted = from_bf16(top_of(values, kSegment)) / 7.0f, divisor = wanted == 0 ? 1.0f : wanted;
            const Bf16Thresholds thresholds = in_bf16(quotient_thresholds(kInt4Bounds, divisor));
            scale[(row * t.k + column) / kSegment] = divisor;
            uint8_t* out = weight + row / 2 * t.k + column;
            for (int i = 0; i < kSegment; ++i) {
                const uint16_t m = values[i] & 0x7fff;
                int level = 0;
                for (int j = 0; j < 7; ++j) level += m > thresholds.at[j];
                const int nibble = (values[i] & 0x8000 ? -level : level) & 0xf;
                out[i] = static_cast<uint8_t>(row % 2 ? out[i] | nibble << 4 : nibble);
            }
        }
    }
}

inline float rows_amax(const Tensor& t, bool exact) {
    uint32_t most = 0;  // as bits: magnitudes are ordered as their bits are, NaN on top
    float values[kSegment];
    for (int64_t row = 0; row < t.n; ++row) {
        for (int64_t column = 0; column < t.k; column += kSegment) {
            const int count = segment_at(column, t.k);
            decode(t, row, column, count, values);
            for (int i = 0; i < count; ++i) {
                const uint32_t m = bits_of(values[i]) & 0x7fffffffu;
                most = m > most ? m : most;
            }
        }
    }
    return exact ? float_of(most) : round_to_bf16(float_of(most));
}

}  // namespace
