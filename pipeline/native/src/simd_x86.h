// What AVX2 and AVX-512 share.
#pragma once

#include <immintrin.h>

#include "maps.h"

namespace {

// ((r0 + r1) + (r2 + r3)) + ((r4 + r5) + (r6 + r7)): the end of numpy's pairwise summation.
inline float folded8(__m256 r) {
    const __m256 pairs = _mm256_add_ps(r, _mm256_permute_ps(r, 0xb1));
    const __m256 fours = _mm256_add_ps(pairs, _mm256_permute_ps(pairs, 0x4e));
    return _mm_cvtss_f32(_mm_add_ss(_mm256_castps256_ps128(fours), _mm256_extractf128_ps(fours, 1)));
}

// Sum of a table's entries for G codes, in the order of `pairwise_sum`.
template <int G>
inline float table_sum(const float* table, const uint8_t* codes) {
    const auto part = [&](int i) {
        const __m256i c = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + i)));
        return _mm256_i32gather_ps(table, _mm256_and_si256(c, _mm256_set1_epi32(0x7f)), 4);
    };
    __m256 r = part(0);
#pragma GCC unroll 4
    for (int i = 8; i < G; i += 8) r = _mm256_add_ps(r, part(i));
    return folded8(r);
}

}  // namespace
