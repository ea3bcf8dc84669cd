// NEON (AArch64): tbl and tbx look 16 codes up in a map of 128 bytes, 64 at a time.
#pragma once

#include <arm_neon.h>

#include "maps.h"

namespace {

using Levels = Map;

inline void make_levels(const CodeValues& v, const Thresholds& t, Zero zero, Levels& levels) {
    make_level_map(v, t, zero, levels);
}

inline void tops16(const uint8_t* codes, int rows, uint8_t* tops) {
    const uint8x16_t mask = vdupq_n_u8(0x7f);
    for (int g = 0; g < 8 * rows; ++g) tops[g] = vmaxvq_u8(vandq_u8(vld1q_u8(codes + 16 * g), mask));
}

inline ByteSet bytes_among(const uint8_t* bytes, int count, int) { return plain_bytes_among(bytes, count); }

// An index beyond a table gives 0 (tbl) or keeps what is there (tbx).
inline uint8x16_t look_up(uint8x16_t magnitudes, const Map& map) {
    const uint8x16_t low = vqtbl4q_u8(vld1q_u8_x4(map.of), magnitudes);
    return vqtbx4q_u8(low, vld1q_u8_x4(map.of + 64), vsubq_u8(magnitudes, vdupq_n_u8(64)));
}

template <int G>
inline void map_bytes(const uint8_t* codes, const Map* maps, const uint8_t* keys, uint8_t* out) {
    const uint8x16_t mask = vdupq_n_u8(0x7f);
    for (int i = 0; i < kCodes; i += 16) {
        const uint8x16_t c = vld1q_u8(codes + i);
        vst1q_u8(out + i, vorrq_u8(look_up(vandq_u8(c, mask), maps[keys[i / G]]), vbicq_u8(c, mask)));
    }
}

inline uint8x16_t nibbles(uint8x16_t c, const Map& map) {
    const uint8x16_t t = look_up(vandq_u8(c, vdupq_n_u8(0x7f)), map);
    const uint8x16_t sign = vshrq_n_u8(vandq_u8(vandq_u8(c, t), vdupq_n_u8(kSigned)), 4);
    return vorrq_u8(vandq_u8(t, vdupq_n_u8(0xf)), sign);
}

template <int G, Zero Z>
inline void map_nibbles(const uint8_t* codes, const Levels* levels, const uint8_t* keys, uint8_t* out) {
    for (int i = 0; i < kCodes; i += 32) {
        const uint8x16_t a = nibbles(vld1q_u8(codes + i), levels[keys[i / G]]);
        const uint8x16_t b = nibbles(vld1q_u8(codes + i + 16), levels[keys[(i + 16) / G]]);
        vst1q_u8(out + i / 2, vorrq_u8(vuzp1q_u8(a, b), vshlq_n_u8(vuzp2q_u8(a, b), 4)));
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
