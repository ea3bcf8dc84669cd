// What the levels (one for each instruction set) offer: a table of functions over plain pointers.
//
// A `Tensor` describes the stored tensors of one linear layer, or of a strip of its rows; strips of FP8 blocks start at
// a multiple of 128. Every array is row-major and dense. Kernels write into the caller's buffers and allocate nothing.
// The specification of all results, to the bit, is the numpy code in pipeline/formats.
#pragma once

#include <cstdint>

namespace native {

enum class Layout : int { bf16, f16, f32, fp8, fp8_channel, fp8_block, nvfp4, mxfp8, mxfp4, int4 };

struct Tensor {
    Layout layout;
    int64_t n, k;             // the weight's shape, [N, K]
    const void* weight;       // codes or floats, as stored
    const void* scale;        // weight_scale or weight_scale_inv; none for floats and fp8
    float scale_2;            // weight_scale_2 of nvfp4, weight_scale of fp8
    int group;                // weights along K that share a scale: nvfp4 16 or 32
    const uint16_t* factors;  // pre_quant_scale of int4, BF16 [K]; or none
};

enum class Search : int { amax, four_over_six, least_error };

struct Nvfp4 {
    float scale_2;   // weight_scale_2
    int group;       // 16 or 32
    bool exact;      // quantise float32; else round to BF16 first, as ModelOpt does
    Search search;
    float amax;      // four_over_six: the tensor's amax
    float unit;      // four_over_six: the block scale that amax / 6 gets
    int reach;       // least_error: steps from the code of block amax / 6
    int last_code;   // least_error: the largest code allowed
};

// Errors of each row; sums are in a fixed order (see errors.h), so they are the same at every level.
struct RowErrors {
    double* signal;    // [N] sum w^2
    double* noise;     // [N] sum (w' - w)^2
    double* max_abs;   // [N] largest |w' - w|; NaN if any is
    int64_t* clipped;  // [N] elements with |w| beyond the limit
};

struct Kernels {
    const char* name;
    // Largest magnitude, each value rounded to BF16 unless exact; NaN if any is. `quick` passes over FP8 blocks whose scale
    // does not allow a larger one, and so over their NaNs.
    float (*amax)(const Tensor&, bool exact, bool quick);
    void (*bf16)(const Tensor&, uint16_t* weight);
    void (*fp8)(const Tensor&, float scale, uint8_t* weight);
    void (*fp8_channel)(const Tensor&, uint8_t* weight, float* scale);
    void (*mxfp8)(const Tensor&, uint8_t* weight, uint8_t* scale);
    void (*mxfp4)(const Tensor&, uint8_t* weight, uint8_t* scale);
    void (*int4)(const Tensor&, uint8_t* weight, float* scale);
    // False if a code of FP8 blocks is NaN; of other sources NaN is not looked for.
    bool (*nvfp4)(const Tensor&, const Nvfp4&, uint8_t* weight, uint8_t* scale);
    void (*errors)(const Tensor& wanted, const Tensor& got, double limit, const RowErrors&);
};

extern const Kernels scalar_kernels;
extern const Kernels avx2_kernels;
extern const Kernels avx512_kernels;
extern const Kernels neon_kernels;

}  // namespace native
