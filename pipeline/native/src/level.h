// One level's table. A level's .cpp file includes its simd_*.h, then this, and defines the table under its name.
#pragma once

#include "errors.h"
#include "rows.h"

namespace {

inline bool in_blocks(const Tensor& t) { return t.layout == Layout::fp8_block; }

float amax(const Tensor& t, bool exact, bool quick) {
    return in_blocks(t) ? tiles_amax(t, exact, quick) : rows_amax(t, exact);
}

void fp8(const Tensor& t, float scale, uint8_t* weight) {
    in_blocks(t) ? tiles_to_fp8(t, scale, weight) : rows_to_fp8(t, scale, weight);
}

void mxfp8(const Tensor& t, uint8_t* weight, uint8_t* scale) {
    in_blocks(t) ? tiles_to_mxfp8(t, weight, scale) : rows_to_mxfp8(t, weight, scale);
}

void mxfp4(const Tensor& t, uint8_t* weight, uint8_t* scale) {
    in_blocks(t) ? tiles_to_mxfp4(t, weight, scale) : rows_to_mxfp4(t, weight, scale);
}

template <int G>
bool nvfp4_by(const Tensor& t, const native::Nvfp4& p, uint8_t* weight, uint8_t* scale) {
    if (in_blocks(t)) return tiles_to_nvfp4<G>(t, p, weight, scale);
    rows_to_nvfp4<G>(t, p, weight, scale);
    return true;
}

bool nvfp4(const Tensor& t, const native::Nvfp4& p, uint8_t* weight, uint8_t* scale) {
    return p.group == 16 ? nvfp4_by<16>(t, p, weight, scale) : nvfp4_by<32>(t, p, weight, scale);
}

}  // namespace

#define NATIVE_KERNELS(name) \
    {name, amax, rows_to_bf16, fp8, rows_to_fp8_channel, mxfp8, mxfp4, rows_to_int4, nvfp4, row_errors}
