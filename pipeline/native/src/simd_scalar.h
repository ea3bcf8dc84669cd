// The portable level: plain C++, one element at a time. It also documents what the others compute.
#pragma once

#include "maps.h"

namespace {

using Levels = Map;

inline void make_levels(const CodeValues& v, const Thresholds& t, Zero zero, Levels& levels) {
    make_level_map(v, t, zero, levels);
}

// Largest magnitude code of each 16 codes, of rows of 128; for each row of a group of eight, of which fewer may count.
inline void tops16(const uint8_t* codes, int rows, uint8_t* tops) {
    for (int g = 0; g < 8 * rows; ++g) {
        uint8_t top = 0;
        for (int i = 0; i < 16; ++i) {
            const uint8_t m = codes[16 * g + i] & 0x7f;
            top = m > top ? m : top;
        }
        tops[g] = top;
    }
}

// Values that occur, all of which are below `limit`.
inline ByteSet bytes_among(const uint8_t* bytes, int count, int) { return plain_bytes_among(bytes, count); }

// 128 codes to 128 bytes; group g of G codes goes through maps[keys[g]].
template <int G>
inline void map_bytes(const uint8_t* codes, const Map* maps, const uint8_t* keys, uint8_t* out) {
    for (int i = 0; i < kCodes; ++i) {
        out[i] = static_cast<uint8_t>(maps[keys[i / G]].of[codes[i] & 0x7f] | (codes[i] & 0x80));
    }
}

// 128 codes to 64 bytes of two nibbles, the even element in the low one.
template <int G, Zero Z>
inline void map_nibbles(const uint8_t* codes, const Levels* levels, const uint8_t* keys, uint8_t* out) {
    for (int i = 0; i < kCodes; i += 2) {
        const uint8_t* of = levels[keys[i / G]].of;
        const unsigned low = of[codes[i] & 0x7f], high = of[codes[i + 1] & 0x7f];
        const unsigned low_sign = (codes[i] & low & kSigned) >> 4, high_sign = (codes[i + 1] & high & kSigned) >> 4;
        out[i / 2] = static_cast<uint8_t>((low & 0xf) | low_sign | ((high & 0xf) | high_sign) << 4);
    }
}

inline void e4m3_values(const uint8_t* codes, int count, float scale, float* out) {
    plain_e4m3_values(codes, count, scale, out);
}

// Of a group of G elements.
template <int G>
inline void e2m1_values(const uint8_t* packed, float scale, float* out) {
    plain_e2m1_values(packed, G, scale, out);
}

template <int G>
inline float table_sum(const float* table, const uint8_t* codes) {
    return plain_table_sum<G>(table, codes);
}

}  // namespace
