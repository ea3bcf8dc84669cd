// From FP8 with 128x128 block scales, in code space: see maps.h. A tile is one block, or what of it the tensor has.
#pragma once

#include "search.h"
#include "source.h"

namespace {

// A tile's place, without its codes.
struct TilePlace {
    const uint8_t* codes;  // in the tensor, rows `stride` bytes apart
    int64_t stride, row, column;
    int rows, width;
    float scale;
};

// A tile with its codes in one piece: rows of a tensor are often a multiple of 1024 bytes apart, and would evict each
// other from the first cache. Rows are always 128 codes long; narrow ones are filled up with zeros.
struct Tile : TilePlace {
    alignas(64) uint8_t local[kBlock * kBlock];
};

template <class Visit>
inline void for_each_place(const Tensor& t, Visit visit) {
    const int64_t across = (t.k + kBlock - 1) / kBlock;
    for (int64_t row = 0; row < t.n; row += kBlock) {
        for (int64_t column = 0; column < t.k; column += kBlock) {
            const auto* codes = static_cast<const uint8_t*>(t.weight) + row * t.k + column;
            const int rows = static_cast<int>(t.n - row < kBlock ? t.n - row : kBlock);
            const float scale = static_cast<const float*>(t.scale)[row / kBlock * across + column / kBlock];
            visit(TilePlace{codes, t.k, row, column, rows, segment_at(column, t.k), scale});
        }
    }
}

// Copies a tile, and asks for the one to its right, all at once: spread over the work below it came too late.
inline void fetch(const TilePlace& place, Tile& tile) {
    static_cast<TilePlace&>(tile) = place;
    for (int r = 0; r < place.rows; ++r) {
        const uint8_t* from = place.codes + r * place.stride;
        uint8_t* to = tile.local + r * kBlock;
        __builtin_prefetch(from + kBlock, 0, 2);
        __builtin_prefetch(from + kBlock + 64, 0, 2);
        if (place.width == kBlock) {
            std::memcpy(to, from, kBlock);
        } else {
            std::memset(to, 0, kBlock);
            std::memcpy(to, from, static_cast<unsigned>(place.width));
        }
    }
}

template <class Visit>
inline void for_each_tile(const Tensor& t, Visit visit) {
    Tile tile;
    for_each_place(t, [&](const TilePlace& place) {
        fetch(place, tile);
        visit(static_cast<const Tile&>(tile));
    });
}

// Where a row's result goes: straight to its place, or, from a narrow tile, through a buffer.
template <class Write>
inline void put(uint8_t* out, int size, int full, Write write) {
    if (size == full) {
        write(out);
        return;
    }
    uint8_t buffer[kBlock];
    write(buffer);
    std::memcpy(out, buffer, static_cast<unsigned>(size));
}

inline uint8_t largest(const uint8_t* bytes, int count) {
    uint8_t top = 0;
    for (int i = 0; i < count; ++i) top = bytes[i] > top ? bytes[i] : top;
    return top;
}

// Largest magnitude code of each group of G: [rows, 128 / G].
template <int G>
inline void group_tops(const Tile& tile, uint8_t* tops) {
    alignas(64) uint8_t of16[kBlock * 8];
    tops16(tile.local, tile.rows, G == 16 ? tops : of16);
    if constexpr (G == 32) {
        for (int i = 0; i < tile.rows * 4; ++i) tops[i] = of16[2 * i] > of16[2 * i + 1] ? of16[2 * i] : of16[2 * i + 1];
    }
}

// keys[i] = map.of[tops[i]], for all groups of a tile.
inline void keys_of(const uint8_t* tops, int count, const Map& map, uint8_t* keys) {
    constexpr uint8_t only = 0;
    for (int i = 0; i < count; i += kCodes) map_bytes<kCodes>(tops + i, &map, &only, keys + i);
}

// Calls make(key) once for each key that occurs, all of which are below Limit.
template <int Limit, class Make>
inline void for_each_key(const uint8_t* keys, int count, Make make) {
    const ByteSet found = bytes_among(keys, count, Limit);
    for (int w = 0; w < 4; ++w) {
        for (uint64_t left = found.bits[w]; left; left &= left - 1) make(static_cast<uint8_t>(64 * w + __builtin_ctzll(left)));
    }
}

template <int G>
inline void put_scales(const Tile& tile, const uint8_t* keys, uint8_t* scale, int64_t k) {
    constexpr int full = kBlock / G;
    for (int r = 0; r < tile.rows; ++r) {
        put(scale + ((tile.row + r) * k + tile.column) / G, tile.width / G, full, [&](uint8_t* to) {
            std::memcpy(to, keys + r * full, full);
        });
    }
}

// Two codes a byte; group g of row r goes through levels[keys[r * (128 / G) + g]].
template <int G, Zero Z>
inline void put_nibbles(const Tile& tile, const Levels* levels, const uint8_t* keys, uint8_t* weight, int64_t k) {
    for (int r = 0; r < tile.rows; ++r) {
        uint8_t* out = weight + ((tile.row + r) * k + tile.column) / 2;
        put(out, tile.width / 2, kBlock / 2, [&](uint8_t* to) {
            map_nibbles<G, Z>(tile.local + r * kBlock, levels, keys + r * (kBlock / G), to);
        });
    }
}

template <int G>
inline void put_bytes(const Tile& tile, const Map* maps, const uint8_t* keys, uint8_t* weight, int64_t k) {
    for (int r = 0; r < tile.rows; ++r) {
        put(weight + (tile.row + r) * k + tile.column, tile.width, kBlock, [&](uint8_t* to) {
            map_bytes<G>(tile.local + r * kBlock, maps, keys + r * (kBlock / G), to);
        });
    }
}

template <class KeyOf>
inline Map key_map(const CodeValues& values, KeyOf key_of) {
    Map map;
    for (int m = 0; m < kCodes; ++m) map.of[m] = key_of(values.real[m]);
    return map;
}

// Squared error of each code under each block scale, made when first asked for.
class ErrorTables {
public:
    ErrorTables(const CodeValues& values, float scale_2) : values_(values), scale_2_(scale_2) {}

    const float* of(int code) {
        if (!ready_[code]) {
            const float scale = from_e4m3(static_cast<uint32_t>(code)), divisor = scale * scale_2_;
            for (int m = 0; m < kCodes; ++m) errors_[code][m] = squared_error(values_.real[m], divisor, scale);
            ready_[code] = true;
        }
        return errors_[code];
    }

private:
    const CodeValues& values_;
    float scale_2_;
    bool ready_[kCodes] = {};
    alignas(64) float errors_[kCodes][kCodes];
};

template <int G>
inline void searched_keys(const Tile& tile, const native::Nvfp4& p, const CodeValues& values, const uint8_t* tops, uint8_t* keys) {
    ErrorTables tables(values, p.scale_2);
    for (int r = 0; r < tile.rows; ++r) {
        const uint8_t* codes = tile.local + r * kBlock;
        for (int g = 0; g < kBlock / G; ++g) {
            const int at = r * (kBlock / G) + g;
            keys[at] = searched_code(values.real[tops[at]], p, [&](int code) {
                return table_sum<G>(tables.of(code), codes + g * G);
            });
        }
    }
}

// Thresholds by block scale code, made when first asked for.
class ScaleThresholds {
public:
    explicit ScaleThresholds(float scale_2) : scale_2_(scale_2) {}

    const Thresholds& of(uint8_t code) {
        if (!ready_[code]) {
            by_code_[code] = quotient_thresholds(kE2m1Bounds, from_e4m3(code) * scale_2_);
            ready_[code] = true;
        }
        return by_code_[code];
    }

private:
    float scale_2_;
    bool ready_[kCodes] = {};
    Thresholds by_code_[kCodes];
};

// Returns whether no code is NaN.
template <int G>
bool tiles_to_nvfp4(const Tensor& t, const native::Nvfp4& p, uint8_t* weight, uint8_t* scale) {
    ScaleThresholds thresholds(p.scale_2);
    bool numbers = true;
    for_each_tile(t, [&](const Tile& tile) {
        alignas(64) uint8_t tops[kBlock * kBlock / G], keys[kBlock * kBlock / G];
        const int count = tile.rows * (kBlock / G);
        const CodeValues values = code_values(tile.scale, p.exact);
        group_tops<G>(tile, tops);
        numbers &= largest(tops, count) != kE4m3Nan;
        if (p.search == native::Search::amax) {
            keys_of(tops, count, key_map(values, [&](float top) { return amax_scale_code(top, p.scale_2); }), keys);
        } else {
            searched_keys<G>(tile, p, values, tops, keys);
        }
        Levels levels[kCodes];
        for_each_key<kCodes>(keys, count, [&](uint8_t key) { make_levels(values, thresholds.of(key), Zero::plain, levels[key]); });
        put_nibbles<G, Zero::plain>(tile, levels, keys, weight, t.k);
        put_scales<G>(tile, keys, scale, t.k);
    });
    return numbers;
}

inline void tiles_to_mxfp4(const Tensor& t, uint8_t* weight, uint8_t* scale) {
    for_each_tile(t, [&](const Tile& tile) {
        alignas(64) uint8_t tops[kBlock * 4], keys[kBlock * 4];
        const CodeValues values = code_values(tile.scale, false);
        group_tops<32>(tile, tops);
        keys_of(tops, tile.rows * 4, key_map(values, [](float top) { return to_e8m0(top / kE2m1Max); }), keys);
        Levels levels[256];
        for_each_key<256>(keys, tile.rows * 4, [&](uint8_t key) {
            make_levels(values, power_thresholds(key), Zero::negative, levels[key]);
        });
        put_nibbles<32, Zero::negative>(tile, levels, keys, weight, t.k);
        put_scales<32>(tile, keys, scale, t.k);
    });
}

inline void tiles_to_mxfp8(const Tensor& t, uint8_t* weight, uint8_t* scale) {
    for_each_tile(t, [&](const Tile& tile) {
        alignas(64) uint8_t tops[kBlock * 4], keys[kBlock * 4];
        const CodeValues values = code_values(tile.scale, false);
        group_tops<32>(tile, tops);
        keys_of(tops, tile.rows * 4, key_map(values, [](float top) { return to_e8m0(top / kE4m3Max); }), keys);
        Map maps[256];
        for_each_key<256>(keys, tile.rows * 4, [&](uint8_t key) {
            const float power = from_e8m0(254u - key);
            for (int m = 0; m < kCodes; ++m) maps[key].of[m] = to_e4m3(values.real[m] * power);
        });
        put_bytes<32>(tile, maps, keys, weight, t.k);
        put_scales<32>(tile, keys, scale, t.k);
    });
}

inline void tiles_to_fp8(const Tensor& t, float scale, uint8_t* weight) {
    constexpr uint8_t only[kBlock] = {};
    for_each_tile(t, [&](const Tile& tile) {
        const CodeValues values = code_values(tile.scale, false);
        Map map;
        for (int m = 0; m < kCodes; ++m) map.of[m] = to_e4m3(values.real[m] / scale);
        put_bytes<kBlock>(tile, &map, only, weight, t.k);
    });
}

// Largest magnitude code of a tile where it lies.
inline uint8_t top_of(const TilePlace& tile) {
    alignas(64) uint8_t fold[kBlock] = {};
    for (int r = 0; r < tile.rows; ++r) {
        const uint8_t* codes = tile.codes + r * tile.stride;
        for (int i = 0; i < tile.width; ++i) {
            const uint8_t m = codes[i] & 0x7f;
            fold[i] = m > fold[i] ? m : fold[i];
        }
    }
    return largest(fold, kBlock);
}

// A tile holds nothing beyond 448 times its scale, and one that was quantised to its own maximum holds just that: then the
// tile of the largest scale is the only one to look at.
inline float tiles_amax(const Tensor& t, bool exact, bool quick) {
    uint32_t most = 0;  // as bits: magnitudes are ordered as their bits are, NaN on top
    const auto look = [&](const TilePlace& tile) {
        const uint32_t value = bits_of(magnitude(from_e4m3(top_of(tile)) * tile.scale));
        most = value > most ? value : most;
    };
    if (quick) {
        TilePlace first{};
        for_each_place(t, [&](const TilePlace& tile) {
            if (!first.codes || bits_of(magnitude(tile.scale)) > bits_of(magnitude(first.scale))) first = tile;
        });
        if (first.codes) look(first);
    }
    for_each_place(t, [&](const TilePlace& tile) {
        if (!quick || bits_of(magnitude(kE4m3Max * tile.scale)) > most) look(tile);
    });
    return exact ? float_of(most) : round_to_bf16(float_of(most));
}

}  // namespace
