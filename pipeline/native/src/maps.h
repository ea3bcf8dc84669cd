// Maps from E4M3 magnitude codes to what they become, and the plain (portable) way to apply them.
//
// Within a tile of 128x128 all weights share a scale, so a weight's value is a function of its code, and the order of
// codes (without the sign) is the order of values. A target with eight magnitudes is then a map from 127 codes to
// levels, made once for each scale that the target uses in the tile.
//
// Each simd_*.h offers: tops16, bytes_among, map_bytes, map_nibbles, `Levels` with make_levels, to decode e4m3_values
// and e2m1_values, and to search table_sum.
#pragma once

#include "thresholds.h"

namespace {

constexpr int kCodes = 128;

// What a code becomes, by its magnitude; the sign is carried over.
struct alignas(64) Map {
    uint8_t of[kCodes];
};

// Values of a tile's codes: bits of BF16, or float32 in exact mode. Both are ordered as the codes are.
struct alignas(64) CodeValues {
    float real[kCodes];
    uint16_t bf16[kCodes];
    bool exact;
};

inline CodeValues code_values(float scale, bool exact) {
    CodeValues v;
    v.exact = exact;
    for (uint32_t m = 0; m < kCodes; ++m) v.real[m] = from_e4m3(m) * scale;
    if (!exact) {
        for (int m = 0; m < kCodes; ++m) v.bf16[m] = to_bf16(v.real[m]);
        for (int m = 0; m < kCodes; ++m) v.real[m] = from_bf16(v.bf16[m]);
    }
    return v;
}

// Which values occur among bytes.
struct ByteSet {
    uint64_t bits[4];
};

inline ByteSet plain_bytes_among(const uint8_t* bytes, int count) {
    uint8_t seen[256] = {};
    for (int i = 0; i < count; ++i) seen[bytes[i]] = 1;
    ByteSet found = {};
    for (int b = 0; b < 256; ++b) found.bits[b / 64] |= static_cast<uint64_t>(seen[b]) << b % 64;
    return found;
}

// The nibble of a zero is 0; MXFP4 gives it the sign bit.
enum class Zero { plain, negative };

constexpr uint8_t kSigned = 0x80;  // in a map of levels: the code's sign counts

// Level of each code, with `kSigned` where the value is not (or does not become) zero.
template <class Value>
inline void count_levels(const Value* value, const Value (&at)[8], Zero zero, Map& map) {
    const uint8_t unsigned_zero = zero == Zero::negative ? 8 : 0;
    for (int m = 0; m < kCodes; ++m) {
        uint16_t level = 0;
        for (int i = 0; i < 7; ++i) level = static_cast<uint16_t>(level + (value[m] > at[i]));
        map.of[m] = static_cast<uint8_t>(level | (value[m] > at[7] ? kSigned : unsigned_zero));
    }
}

inline void make_level_map(const CodeValues& v, const Thresholds& t, Zero zero, Map& map) {
    if (v.exact) {
        count_levels(v.real, t.at, zero, map);
        return;
    }
    uint16_t at[8];
    for (int i = 0; i < 8; ++i) at[i] = static_cast<uint16_t>(bits_of(t.at[i]) >> 16);  // the largest BF16 at most t
    count_levels(v.bf16, at, zero, map);
}

}  // namespace
