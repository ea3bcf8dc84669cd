// BF16 activations to FP8 (E4M3, a float32 scale for each 1x128) and NVFP4 (E2M1, an E4M3 scale for each 1x16), and back.
//
// Memory-bound: a lane loads 16 bytes (8 values, a "piece") UNROLL times before it uses any, neighbours side by side; lanes that
// share a group find its largest magnitude with shuffles. Codes and scales have row strides: they may be parts of one packed row,
// which is what ranks send each other. Compiled by NVRTC: COLUMNS, UNROLL, THREADS and LARGE (x is more than the L2 holds).

#include "../numerics.cuh"

#ifndef LARGE
#define LARGE 0
#endif

constexpr u32 ROW = COLUMNS / 8, QUADS = COLUMNS / 64;  // pieces of a row; words of four NVFP4 scales

__device__ __forceinline__ u32 first_piece() { return blockIdx.x * (THREADS * UNROLL) + threadIdx.x; }

// The pieces of this thread, zeros beyond the end.
__device__ __forceinline__ void load(uint4 (&v)[UNROLL], const uint4* x, u32 first, u32 pieces) {
#pragma unroll
  for (int i = 0; i < UNROLL; ++i) {
    v[i] = make_uint4(0, 0, 0, 0);
    if (first + i * THREADS < pieces) v[i] = load_once(x + first + i * THREADS);
  }
}

// x [rows, COLUMNS] -> codes[row * code_stride + piece], scales[row * row_stride + group * group_stride]. A lane's pieces are of one
// group, so that UNROLL of them share the search for its scale; where they go is worked out while they come.
extern "C" __global__ void __launch_bounds__(THREADS)
fp8_quantize(const uint4* __restrict__ x, uint2* __restrict__ codes, float* __restrict__ scales, u32 pieces, u32 code_stride,
             u32 row_stride, u32 group_stride) {
  constexpr u32 LANES = 16 / UNROLL;
  constexpr bool WHOLE = ROW % (32 * UNROLL) == 0;  // no warp has lanes on both sides of the end
  const u32 lane = blockIdx.x * THREADS + threadIdx.x, first = lane / LANES * 16 + lane % LANES;
  uint4 v[UNROLL];
  u32 top = 0;
  wait_for_inputs();
  if (WHOLE && first >= pieces) return;
  const u32 piece = WHOLE ? first : min(first, pieces - 16 + lane % LANES);  // beyond the end, the last group again
#pragma unroll
  for (int i = 0; i < UNROLL; ++i) v[i] = LARGE ? load_input(x + piece + i * LANES) : load_once(x + piece + i * LANES);
#pragma unroll
  for (int i = 0; i < UNROLL; ++i) top = max(top, top_of(v[i]));
  const Fp8Group group(group_top<LANES>(top));
  const u32 row = piece / ROW, column = piece % ROW;
#pragma unroll
  for (int i = 0; i < UNROLL; ++i) codes[row * code_stride + column + i * LANES] = group.codes(v[i]);
  if (lane % LANES == 0) scales[row * row_stride + column / 16 * group_stride] = group.scale();
}

// codes and scales as above, the scales of a row side by side -> out BF16
extern "C" __global__ void __launch_bounds__(THREADS)
fp8_dequantize(const uint2* __restrict__ codes, const float* __restrict__ scales, uint4* __restrict__ out, u32 pieces,
               u32 code_stride, u32 row_stride) {
  const u32 first = first_piece();
  uint2 eight[UNROLL];
  float scale[UNROLL];
  wait_for_inputs();
#pragma unroll
  for (int i = 0; i < UNROLL; ++i) {
    const u32 piece = min(first + i * THREADS, pieces - 1), row = piece / ROW;
    eight[i] = codes[row * code_stride + piece % ROW], scale[i] = scales[row * row_stride + piece % ROW / 16];
  }
#pragma unroll
  for (int i = 0; i < UNROLL; ++i) {
    u32 words[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const u32 pair = (w < 2 ? eight[i].x : eight[i].y) >> w % 2 * 16;
      words[w] = bf16_pair(decode_e4m3(pair & 0xFFu) * scale[i], decode_e4m3(pair >> 8 & 0xFFu) * scale[i]);
    }
    if (first + i * THREADS < pieces) out[first + i * THREADS] = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// Where the four scales of columns 4 * quad.. of a row are, in words: row by row, or (stride 0) in tiles of 128 rows by 4 columns
// whose rows r, r + 32, r + 64 and r + 96 lie side by side, as tensor cores read them.
__device__ __forceinline__ u32 scale_word(u32 row, u32 quad, u32 stride) {
  return stride ? row * stride + quad : (row / 128 * QUADS + quad) * 128 + row % 32 * 4 + row % 128 / 32;
}

// x [rows, COLUMNS] and input_scale [1] -> codes, four scales a word; threads beyond the pieces write `padding` words of zero
extern "C" __global__ void __launch_bounds__(THREADS)
nvfp4_quantize(const uint4* __restrict__ x, const float* __restrict__ input_scale, u32* __restrict__ codes,
               u32* __restrict__ scales, u32 pieces, u32 padding, u32 code_stride, u32 scale_stride) {
  __shared__ float inverses[128];  // of each block scale times the tensor's
  const u32 first = first_piece();
  uint4 v[UNROLL];
  wait_for_inputs();
  load(v, x, first, pieces);
  const float scale_2 = *input_scale, sixth = __fdiv_rn(1.f, __fmul_rn(6.f, scale_2));
  for (int code = threadIdx.x; code < 128; code += THREADS)
    inverses[code] = __fdiv_rn(1.f, __fmul_rn(decode_e4m3(code), scale_2));
  __syncthreads();
#pragma unroll
  for (int i = 0; i < UNROLL; ++i) {
    const u32 piece = first + i * THREADS, row = piece / ROW, column = piece % ROW;
    const float wanted = __uint_as_float(group_top<2>(top_of(v[i])) << 16) * sixth;
    const u32 code = wanted == 0.f ? 0x38u : max(e4m3_pair(wanted, 0.f), 1u);  // 1 for a group of zeros
    u32 quad_scales = code << threadIdx.x % 8 / 2 * 8;
    quad_scales |= __shfl_xor_sync(~0u, quad_scales, 2);
    quad_scales |= __shfl_xor_sync(~0u, quad_scales, 4);
    if (piece < pieces) {
      codes[row * code_stride + column] = e2m1_codes(v[i], inverses[code]);
      if (piece % 8 == 0) scales[scale_word(row, column / 8, scale_stride)] = quad_scales;
    } else if (piece - pieces < padding) {
      const u32 word = pieces / 8 + piece - pieces;
      scales[scale_word(word / QUADS, word % QUADS, scale_stride)] = 0;
    }
  }
}

// codes and scales row by row, strides in words and bytes, scale_2 [1] -> out BF16
extern "C" __global__ void __launch_bounds__(THREADS)
nvfp4_dequantize(const u32* __restrict__ codes, const u8* __restrict__ scales, const float* __restrict__ scale_2,
                 uint4* __restrict__ out, u32 pieces, u32 code_stride, u32 scale_stride) {
  const u32 first = first_piece();
  u32 eight[UNROLL], scale[UNROLL];
  wait_for_inputs();
#pragma unroll
  for (int i = 0; i < UNROLL; ++i) {
    const u32 piece = min(first + i * THREADS, pieces - 1), row = piece / ROW;
    eight[i] = codes[row * code_stride + piece % ROW], scale[i] = scales[row * scale_stride + piece % ROW / 2];
  }
  const float whole = *scale_2;
#pragma unroll
  for (int i = 0; i < UNROLL; ++i) {
    const float factor = __fmul_rn(decode_e4m3(scale[i]), whole);
    u32 words[4];
#pragma unroll
    for (int w = 0; w < 4; ++w)
      words[w] = bf16_pair(decode_e2m1(eight[i] >> 8 * w) * factor, decode_e2m1(eight[i] >> (8 * w + 4)) * factor);
    if (first + i * THREADS < pieces) out[first + i * THREADS] = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// scales row by row, four a word -> in tiles, zeros beyond `rows`; a thread a word
extern "C" __global__ void __launch_bounds__(THREADS)
tile_scales(const u32* __restrict__ scales, u32* __restrict__ tiled, u32 rows, u32 scale_rows, u32 scale_stride) {
  wait_for_inputs();
  const u32 i = blockIdx.x * THREADS + threadIdx.x, row = i / QUADS, quad = i % QUADS;
  if (row < scale_rows) tiled[scale_word(row, quad, 0)] = row < rows ? scales[row * scale_stride + quad] : 0u;
}
