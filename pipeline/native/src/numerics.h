// E4M3, E2M1, E8M0 and BF16 arithmetic on one number; written without branches, so that loops over it vectorise.
//
// Sources: E4M3 and E2M1 as in the OCP formats (8-bit and Microscaling specifications), the order of operations as in
// pipeline/formats. Rounding is to nearest, ties to even. Compiled with -ffp-contract=off: each operation rounds once.
// The namespace has no name on purpose: each level compiles a copy of its own, for its own instruction set.
#pragma once

#include <cstdint>
#include <cstring>

namespace {

constexpr int kBlock = 128;  // rows and columns that share a scale in an FP8-block tensor
constexpr float kE4m3Max = 448.0f, kE4m3Tiny = 1.0f / 512, kE2m1Max = 6.0f;
constexpr uint8_t kE4m3One = 0x38, kE4m3Nan = 0x7f;

inline uint32_t bits_of(float x) {
    uint32_t u;
    std::memcpy(&u, &x, sizeof u);
    return u;
}

inline float float_of(uint32_t u) {
    float x;
    std::memcpy(&x, &u, sizeof x);
    return x;
}

inline float magnitude(float x) { return float_of(bits_of(x) & 0x7fffffffu); }

inline float larger(float a, float b) { return a > b ? a : b; }

inline float smaller(float a, float b) { return a < b ? a : b; }

inline uint16_t to_bf16(float x) {
    const uint32_t u = bits_of(x);
    const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    return static_cast<uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? ((u >> 16) & 0x8000u) | 0x7fc0u : rounded);
}

inline float from_bf16(uint16_t b) { return float_of(static_cast<uint32_t>(b) << 16); }

inline float round_to_bf16(float x) { return from_bf16(to_bf16(x)); }

// IEEE half to float32; exact. Subnormals are scaled by 2^112 instead of normalised.
inline float from_f16(uint16_t h) {
    const uint32_t rest = (h & 0x7fffu) << 13;
    const float finite = float_of(rest) * float_of(0x77800000u);  // 2^112
    const float special = float_of(rest | 0x7f800000u);
    return float_of(bits_of((h & 0x7c00u) == 0x7c00u ? special : finite) | static_cast<uint32_t>(h & 0x8000u) << 16);
}

// Value of an E4M3 code without its sign (0..127); 127 is NaN.
inline float from_e4m3(uint32_t code) {
    const float normal = float_of((code << 20) + (120u << 23));
    const float subnormal = static_cast<float>(static_cast<int32_t>(code)) * kE4m3Tiny;
    return code == kE4m3Nan ? float_of(0x7fc00000u) : code < 8 ? subnormal : normal;
}

// Value of an E4M3 code with its sign; NaN comes out as NaN.
inline float from_signed_e4m3(uint8_t code) {
    return float_of(bits_of(from_e4m3(code & 0x7fu)) | static_cast<uint32_t>(code & 0x80u) << 24);
}

// E2M1 code (4 bits) to its value.
inline float from_e2m1(uint32_t code) {
    const uint32_t m = code & 7u;
    const float small = static_cast<float>(static_cast<int32_t>(m)) * 0.5f;
    const float large = float_of(((m >> 1) + 126u) << 23 | (m & 1u) << 22);
    return float_of(bits_of(m < 2 ? small : large) | (code & 8u) << 28);
}

// Nearest E4M3 code of x >= 0, saturating at 448. Adding 2^14 leaves a multiple of 2^-9 in the low bits.
inline uint8_t to_e4m3(float x) {
    const float held = x > kE4m3Max ? kE4m3Max : x;
    const uint32_t u = bits_of(held);
    const uint32_t normal = ((u + 0x7ffffu + ((u >> 20) & 1u)) >> 20) - (120u << 3);
    const uint32_t subnormal = bits_of(held + 16384.0f) - bits_of(16384.0f);
    return static_cast<uint8_t>(x != x ? kE4m3Nan : held < 1.0f / 64 ? subnormal : normal);
}

inline uint8_t to_signed_e4m3(float x) {
    return static_cast<uint8_t>(to_e4m3(magnitude(x)) | ((bits_of(x) >> 24) & 0x80u));
}

// The plain way to decode: codes, or nibbles with the even element in the low one, times their scale.
inline void plain_e4m3_values(const uint8_t* codes, int count, float scale, float* out) {
    for (int i = 0; i < count; ++i) out[i] = from_signed_e4m3(codes[i]) * scale;
}

inline void plain_e2m1_values(const uint8_t* packed, int count, float scale, float* out) {
    for (int i = 0; i < count / 2; ++i) {
        out[2 * i] = from_e2m1(packed[i] & 0xfu) * scale;
        out[2 * i + 1] = from_e2m1(packed[i] >> 4) * scale;
    }
}

// Sum of term(0..G-1) in the order of numpy's pairwise summation.
template <int G, class Term>
inline float pairwise_sum(Term term) {
    float r[8];
    for (int j = 0; j < 8; ++j) r[j] = term(j);
    for (int i = 8; i < G; i += 8) {
        for (int j = 0; j < 8; ++j) r[j] += term(i + j);
    }
    return ((r[0] + r[1]) + (r[2] + r[3])) + ((r[4] + r[5]) + (r[6] + r[7]));
}

// Sum of a table's entries for G codes, whatever their signs.
template <int G>
inline float plain_table_sum(const float* table, const uint8_t* codes) {
    return pairwise_sum<G>([&](int i) { return table[codes[i] & 0x7f]; });
}

// Code of the least power of two that is no smaller than x >= 0: ceil(log2 x) + 127, between 0 and 254.
inline uint8_t to_e8m0(float x) {
    if (!(x > 0)) return 0;
    const bool tiny = x < float_of(0x00800000u);
    const uint32_t u = bits_of(tiny ? x * 4294967296.0f : x);
    const int exponent = static_cast<int>(u >> 23) - (tiny ? 32 : 0) + ((u & 0x7fffffu) != 0);
    return static_cast<uint8_t>(exponent < 0 ? 0 : exponent > 254 ? 254 : exponent);
}

inline float from_e8m0(uint32_t code) {
    return code == 255 ? float_of(0x7fc00000u) : code == 0 ? float_of(0x00400000u) : float_of(code << 23);
}

// E4M3 code of a block scale of NVFP4: clamped to [2^-9, 448].
inline uint8_t block_scale_code(float wanted) {
    return to_e4m3(smaller(larger(wanted, kE4m3Tiny), kE4m3Max));
}

// Of block amax / (6 * weight_scale_2); a block of zeros gets the scale 1.
inline uint8_t amax_scale_code(float top, float scale_2) {
    const float wanted = top / (kE2m1Max * scale_2);
    return block_scale_code(wanted == 0 ? 1.0f : wanted);
}

// Nearest E2M1 magnitude as a value; ties as in `encode_e2m1`.
inline float nearest_e2m1(float size) {
    float value = size > 0.25f ? 0.5f : 0.0f;
    value += size >= 0.75f ? 0.5f : 0.0f;
    value += size > 1.25f ? 0.5f : 0.0f;
    value += size >= 1.75f ? 0.5f : 0.0f;
    value += size > 2.5f ? 1.0f : 0.0f;
    value += size >= 3.5f ? 1.0f : 0.0f;
    return value + (size > 5.0f ? 2.0f : 0.0f);
}

}  // namespace
