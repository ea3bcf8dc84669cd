// AVX-512 with VBMI: vpermi2b looks 64 codes up in a map of 128 bytes, and ignores their sign bit.
#pragma once

#include "simd_x86.h"

namespace {

using Levels = Map;

inline void make_levels(const CodeValues& v, const Thresholds& t, Zero zero, Levels& levels) {
    make_level_map(v, t, zero, levels);
}

// Maxima of the halves of a's and b's 128-bit lanes, interleaved: by 8, 16, 32, 64 bits in turn, 16 vectors become one
// whose bytes are the maxima of their 64 lanes.
#define FOLD(bits) \
    inline __m512i fold##bits(__m512i a, __m512i b) { \
        return _mm512_max_epu8(_mm512_unpacklo_epi##bits(a, b), _mm512_unpackhi_epi##bits(a, b)); \
    }
FOLD(8) FOLD(16) FOLD(32) FOLD(64)
#undef FOLD

inline __m512i fold_row(const uint8_t* codes) {
    const __m512i mask = _mm512_set1_epi8(0x7f);
    const __m512i a = _mm512_and_si512(_mm512_loadu_si512(codes), mask);
    const __m512i b = _mm512_and_si512(_mm512_loadu_si512(codes + 64), mask);
    return fold8(a, b);
}

inline __m512i fold_rows(const uint8_t* codes) {
    const __m512i a = fold16(fold_row(codes), fold_row(codes + kCodes));
    return fold32(a, fold16(fold_row(codes + 2 * kCodes), fold_row(codes + 3 * kCodes)));
}

// Eight rows at a time. Byte i of lane l is then that of row i / 2, and of group l, or 4 + l for odd i.
inline void tops16(const uint8_t* codes, int rows, uint8_t* tops) {
    alignas(64) uint8_t order[64];
    for (int i = 0; i < 64; ++i) order[i] = static_cast<uint8_t>(16 * (i % 4) + i / 8 * 2 + i % 8 / 4);
    for (int r = 0; r < rows; r += 8) {
        const __m512i t = fold64(fold_rows(codes + r * kCodes), fold_rows(codes + (r + 4) * kCodes));
        _mm512_store_si512(tops + r * 8, _mm512_permutexvar_epi8(_mm512_load_si512(order), t));
    }
}

inline ByteSet bytes_among(const uint8_t* bytes, int count, int limit) {
    if (count % 8 || limit > 128) return plain_bytes_among(bytes, count);
    const __m512i one = _mm512_set1_epi64(1), half = _mm512_set1_epi64(64);
    __m512i low = _mm512_setzero_si512(), high = low;
    for (int i = 0; i < count; i += 8) {  // a shift beyond 63, or below 0, leaves nothing
        const __m512i b = _mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes + i)));
        low = _mm512_or_si512(low, _mm512_sllv_epi64(one, b));
        high = _mm512_or_si512(high, _mm512_sllv_epi64(one, _mm512_sub_epi64(b, half)));
    }
    return {{static_cast<uint64_t>(_mm512_reduce_or_epi64(low)), static_cast<uint64_t>(_mm512_reduce_or_epi64(high)), 0, 0}};
}

// 64 codes, of which group g goes through maps[keys[g]].
template <int G>
inline __m512i look_up(__m512i codes, const Map* maps, const uint8_t* keys) {
    if constexpr (G >= 64) {
        const Map& map = maps[keys[0]];
        return _mm512_permutex2var_epi8(_mm512_load_si512(map.of), codes, _mm512_load_si512(map.of + 64));
    } else {
        __m512i out = codes;
        constexpr __mmask64 first = (1ull << G) - 1;
#pragma GCC unroll 4
        for (int g = 0; g < 64 / G; ++g) {
            const Map& map = maps[keys[g]];
            const __mmask64 lanes = first << (g * G);
            out = _mm512_mask2_permutex2var_epi8(_mm512_load_si512(map.of), out, lanes, _mm512_load_si512(map.of + 64));
        }
        return out;
    }
}

template <int G>
inline void map_bytes(const uint8_t* codes, const Map* maps, const uint8_t* keys, uint8_t* out) {
    const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
    for (int i = 0; i < kCodes; i += 64) {
        const __m512i c = _mm512_loadu_si512(codes + i);
        const __m512i mapped = look_up<G>(c, maps, keys + i / G);
        _mm512_storeu_si512(out + i, _mm512_or_si512(mapped, _mm512_and_si512(c, sign)));
    }
}

template <int G, Zero Z>
inline void map_nibbles(const uint8_t* codes, const Levels* levels, const uint8_t* keys, uint8_t* out) {
    const __m512i sign = _mm512_set1_epi8(static_cast<char>(kSigned)), low = _mm512_set1_epi8(0xf);
    for (int i = 0; i < kCodes; i += 64) {
        const __m512i c = _mm512_loadu_si512(codes + i);
        const __m512i t = look_up<G>(c, levels, keys + i / G);
        const __m512i s = _mm512_srli_epi16(_mm512_and_si512(_mm512_and_si512(c, t), sign), 4);
        const __m512i nibbles = _mm512_or_si512(_mm512_and_si512(t, low), s);
        const __m512i pairs = _mm512_maddubs_epi16(nibbles, _mm512_set1_epi16(0x1001));  // even + 16 * odd
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i / 2), _mm512_cvtepi16_epi8(pairs));
    }
}

// An E4M3 code, shifted, is the IEEE half of 2^-8 times its value (subnormals too); only NaN has to be put in.
inline void e4m3_values(const uint8_t* codes, int count, float scale, float* out) {
    const __m512 nan = _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000)), factor = _mm512_set1_ps(scale);
    int i = 0;
    for (; i + 16 <= count; i += 16) {
        const __m256i c = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i)));
        const __m256i m = _mm256_and_si256(c, _mm256_set1_epi16(0x7f));
        const __m256i sign = _mm256_slli_epi16(_mm256_xor_si256(c, m), 8);
        const __m512 half = _mm512_cvtph_ps(_mm256_or_si256(_mm256_slli_epi16(m, 7), sign));
        const __mmask16 bad = _mm256_cmpeq_epi16_mask(m, _mm256_set1_epi16(0x7f));
        const __m512 value = _mm512_mask_mov_ps(_mm512_mul_ps(half, _mm512_set1_ps(256)), bad, nan);
        _mm512_storeu_ps(out + i, _mm512_mul_ps(value, factor));
    }
    plain_e4m3_values(codes + i, count - i, scale, out + i);
}

// Of a group of G elements.
template <int G>
inline void e2m1_values(const uint8_t* packed, float scale, float* out) {
    const __m512 values = _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
    for (int i = 0; i < G; i += 16) {
        const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(packed + i / 2));
        const __m128i pairs = _mm_unpacklo_epi8(bytes, _mm_srli_epi16(bytes, 4));  // vpermps looks at four bits
        const __m512 value = _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(pairs), values);
        _mm512_storeu_ps(out + i, _mm512_mul_ps(value, _mm512_set1_ps(scale)));
    }
}

}  // namespace
