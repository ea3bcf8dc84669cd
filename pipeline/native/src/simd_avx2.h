// AVX2 looks up 16 bytes at a time, so eight magnitudes are found by comparing with thresholds in code space instead.
#pragma once

#include "simd_x86.h"

namespace {

// at[i]: the largest code of level i or less; at[7]: the largest code that stands for zero.
struct Levels {
    uint8_t at[8];
};

template <class Value>
inline void count_codes(const Value* value, const Value (&at)[8], Levels& levels) {
    for (int i = 0; i < 8; ++i) {
        uint16_t count = 0;
        for (int m = 0; m < kCodes; ++m) count = static_cast<uint16_t>(count + (value[m] <= at[i] ? 1 : 0));
        levels.at[i] = static_cast<uint8_t>(count ? count - 1 : 0);  // code 0 is a zero: always counted
    }
}

inline void make_levels(const CodeValues& v, const Thresholds& t, Zero, Levels& levels) {
    if (v.exact) {
        count_codes(v.real, t.at, levels);
        return;
    }
    uint16_t at[8];
    for (int i = 0; i < 8; ++i) at[i] = static_cast<uint16_t>(bits_of(t.at[i]) >> 16);
    count_codes(v.bf16, at, levels);
}

inline void row_tops16(const uint8_t* codes, uint8_t* tops) {
    const __m256i mask = _mm256_set1_epi8(0x7f);
    __m256i c[4];
    for (int j = 0; j < 4; ++j) {
        c[j] = _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + 32 * j)), mask);
    }
    // Lane L of c[j] is group 2j + L. Interleave and fold until each lane starts with one byte a group.
    const __m256i a = _mm256_max_epu8(_mm256_unpacklo_epi8(c[0], c[1]), _mm256_unpackhi_epi8(c[0], c[1]));
    const __m256i b = _mm256_max_epu8(_mm256_unpacklo_epi8(c[2], c[3]), _mm256_unpackhi_epi8(c[2], c[3]));
    __m256i t = _mm256_max_epu8(_mm256_unpacklo_epi16(a, b), _mm256_unpackhi_epi16(a, b));
    t = _mm256_max_epu8(t, _mm256_srli_si256(t, 8));
    t = _mm256_max_epu8(t, _mm256_srli_si256(t, 4));
    const __m128i even = _mm256_castsi256_si128(t), odd = _mm256_extracti128_si256(t, 1);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(tops), _mm_unpacklo_epi8(even, odd));
}

inline void tops16(const uint8_t* codes, int rows, uint8_t* tops) {
    for (int r = 0; r < rows; ++r) row_tops16(codes + r * kCodes, tops + r * 8);
}

inline ByteSet bytes_among(const uint8_t* bytes, int count, int) { return plain_bytes_among(bytes, count); }

// 32 codes through one map: eight lookups, each of which gives 0 outside its own 16 codes.
inline __m256i look_up(__m256i magnitudes, const Map& map) {
    const __m256i reach = _mm256_set1_epi8(0x70);
    __m256i out = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int part = 0; part < 8; ++part) {
        const __m256i table = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(map.of) + part));
        const __m256i index = _mm256_adds_epu8(_mm256_xor_si256(magnitudes, _mm256_set1_epi8(static_cast<char>(part << 4))), reach);
        out = _mm256_or_si256(out, _mm256_shuffle_epi8(table, index));
    }
    return out;
}

template <int G>
inline void map_bytes(const uint8_t* codes, const Map* maps, const uint8_t* keys, uint8_t* out) {
    static_assert(G >= 32);
    const __m256i mask = _mm256_set1_epi8(0x7f);
    for (int i = 0; i < kCodes; i += 32) {
        const __m256i c = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + i));
        const __m256i mapped = look_up(_mm256_and_si256(c, mask), maps[keys[i / G]]);
        const __m256i result = _mm256_or_si256(mapped, _mm256_andnot_si256(mask, c));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), result);
    }
}

template <int G>
inline __m256i thresholds_of(const Levels* levels, const uint8_t* keys, int first) {
    const auto load = [&](int i) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(levels[keys[i / G]].at)); };
    return _mm256_inserti128_si256(_mm256_castsi128_si256(load(first)), load(first + 16), 1);
}

template <int G, Zero Z>
inline void map_nibbles(const uint8_t* codes, const Levels* levels, const uint8_t* keys, uint8_t* out) {
    const __m256i mask = _mm256_set1_epi8(0x7f), eight = _mm256_set1_epi8(8);
    for (int i = 0; i < kCodes; i += 32) {
        const __m256i c = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + i));
        const __m256i m = _mm256_and_si256(c, mask), at = thresholds_of<G>(levels, keys, i);
        __m256i n = _mm256_setzero_si256();
#pragma GCC unroll 7
        for (int j = 0; j < 7; ++j) {
            const __m256i bound = _mm256_shuffle_epi8(at, _mm256_set1_epi8(static_cast<char>(j)));
            n = _mm256_sub_epi8(n, _mm256_cmpgt_epi8(m, bound));
        }
        const __m256i something = _mm256_cmpgt_epi8(m, _mm256_shuffle_epi8(at, _mm256_set1_epi8(7)));
        const __m256i negative = _mm256_cmpgt_epi8(_mm256_setzero_si256(), c);
        const __m256i sign = Z == Zero::plain
            ? _mm256_and_si256(negative, something)
            : _mm256_or_si256(negative, _mm256_xor_si256(something, _mm256_set1_epi8(-1)));
        n = _mm256_or_si256(n, _mm256_and_si256(sign, eight));
        const __m256i pairs = _mm256_maddubs_epi16(n, _mm256_set1_epi16(0x1001));  // even + 16 * odd
        const __m128i packed = _mm_packus_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i / 2), packed);
    }
}

// An E4M3 code, shifted, is the IEEE half of 2^-8 times its value (subnormals too); only NaN has to be put in.
inline void e4m3_values(const uint8_t* codes, int count, float scale, float* out) {
    const __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000)), factor = _mm256_set1_ps(scale);
    int i = 0;
    for (; i + 8 <= count; i += 8) {
        const __m128i c = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + i)));
        const __m128i m = _mm_and_si128(c, _mm_set1_epi16(0x7f));
        const __m128i sign = _mm_slli_epi16(_mm_xor_si128(c, m), 8);
        const __m256 half = _mm256_cvtph_ps(_mm_or_si128(_mm_slli_epi16(m, 7), sign));
        const __m256i bad = _mm256_cvtepi16_epi32(_mm_cmpeq_epi16(m, _mm_set1_epi16(0x7f)));
        const __m256 value = _mm256_blendv_ps(_mm256_mul_ps(half, _mm256_set1_ps(256)), nan, _mm256_castsi256_ps(bad));
        _mm256_storeu_ps(out + i, _mm256_mul_ps(value, factor));
    }
    plain_e4m3_values(codes + i, count - i, scale, out + i);
}

// Of a group of G elements.
template <int G>
inline void e2m1_values(const uint8_t* packed, float scale, float* out) {
    const __m256 magnitudes = _mm256_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6);
    for (int i = 0; i < G; i += 8) {
        const __m128i bytes = _mm_loadu_si32(packed + i / 2);
        const __m256i pairs = _mm256_cvtepu8_epi32(_mm_unpacklo_epi8(bytes, _mm_srli_epi16(bytes, 4)));
        const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(pairs, _mm256_set1_epi32(8)), 28);
        const __m256 size = _mm256_permutevar8x32_ps(magnitudes, pairs);  // looks at three bits
        const __m256 value = _mm256_or_ps(size, _mm256_castsi256_ps(sign));
        _mm256_storeu_ps(out + i, _mm256_mul_ps(value, _mm256_set1_ps(scale)));
    }
}

}  // namespace
