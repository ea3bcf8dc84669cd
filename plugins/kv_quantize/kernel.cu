// A KV cache to FP8 or INT8 with one scale a chunk of tokens; the scale is that of a quantile of the magnitudes.
//
// One CTA a chunk, its magnitudes (BF16 without sign: 15 bits, ordered as integers) in registers, two a word. The quantile is
// found by bisection: how many magnitudes are above `middle` is a count and a sum over the CTA, with no atomics, so that the
// result is one definite value. The same search over each thread's largest magnitude comes first and is cheap; the quantile is
// not below what it finds. Compiled by NVRTC: CHUNK tokens of DIM values, THREADS, INT8.

#include "../numerics.cuh"

constexpr int PIECES = CHUNK * DIM / 8, OWN = (PIECES + THREADS - 1) / THREADS, WARPS = THREADS / 32;
constexpr u32 TOPS = 0x80008000u, SIZES = ~TOPS, ONES = 0x00010001u;

static_assert(DIM % 8 == 0 && OWN * 4 < 0x4000, "a thread's counts must fit in 16 bits");

// Sums and maxima over the CTA; `turn` alternates, so that a slow warp still finds what it must read.
__device__ __forceinline__ u32 block_sum(u32 value, u32 (&sums)[2][WARPS], int& turn) {
  value = __reduce_add_sync(~0u, value);
  turn ^= 1;
  if (threadIdx.x % 32 == 0) sums[turn][threadIdx.x / 32] = value;
  __syncthreads();
  return __reduce_add_sync(~0u, threadIdx.x % 32 < WARPS ? sums[turn][threadIdx.x % 32] : 0u);
}

__device__ __forceinline__ u32 block_top(u32 value, u32 (&sums)[2][WARPS], int& turn) {
  value = __reduce_max_sync(~0u, value);
  turn ^= 1;
  if (threadIdx.x % 32 == 0) sums[turn][threadIdx.x / 32] = value;
  __syncthreads();
  return __reduce_max_sync(~0u, sums[turn][threadIdx.x % WARPS]);
}

// Magnitudes of this thread that are above `middle`. (size | 0x8000) - (middle + 1) keeps bit 15 where size > middle.
__device__ __forceinline__ u32 above(const uint4 (&v)[OWN], u32 middle) {
  const u32 taken = (middle + 1) * ONES;
  u32 counts = 0;
#pragma unroll
  for (int i = 0; i < OWN; ++i) {
    counts += (((v[i].x | TOPS) - taken) >> 15 & ONES) + (((v[i].y | TOPS) - taken) >> 15 & ONES);
    counts += (((v[i].z | TOPS) - taken) >> 15 & ONES) + (((v[i].w | TOPS) - taken) >> 15 & ONES);
  }
  return (counts & 0xFFFFu) + (counts >> 16);
}

// Least magnitude that at most `over` of the CTA's are above.
__device__ __forceinline__ u32 quantile_of(const uint4 (&v)[OWN], u32 over, u32 (&sums)[2][WARPS]) {
  int turn = 0;
  u32 own = 0;
#pragma unroll
  for (int i = 0; i < OWN; ++i) own = max(own, top_of(v[i]));
  const u32 top = block_top(own, sums, turn);
  u32 low = 0, high = top;  // of the threads' largest: if more than `over` are above, so are more of all
#pragma unroll 1
  while (low < high) {
    const u32 middle = (low + high) / 2;
    if (block_sum(own > middle, sums, turn) > over) low = middle + 1;
    else high = middle;
  }
  high = top;
#pragma unroll 1
  while (low < high) {
    const u32 middle = (low + high) / 2;
    if (block_sum(above(v, middle), sums, turn) > over) low = middle + 1;
    else high = middle;
  }
  return low;
}

__device__ __forceinline__ u32 code_pair(u32 pair, float inverse) {
  const float first = first_of(pair) * inverse, second = second_of(pair) * inverse;
#if INT8
  const int a = first == first ? __float2int_rn(fminf(fmaxf(first, -127.f), 127.f)) : 0;
  const int b = second == second ? __float2int_rn(fminf(fmaxf(second, -127.f), 127.f)) : 0;
  return (a & 0xFF) | (b & 0xFF) << 8;
#else
  return e4m3_pair(first, second);
#endif
}

// x [tokens, DIM] -> codes [tokens, DIM], scales [chunks]; `over` magnitudes of a chunk may saturate, `last_over` of the last one
extern "C" __global__ void __launch_bounds__(THREADS)
kv_quantize(const uint4* __restrict__ x, uint2* __restrict__ codes, float* __restrict__ scales, int tokens, int over,
            int last_over) {
  __shared__ u32 sums[2][WARPS];
  const int chunk = blockIdx.x, begin = chunk * PIECES, pieces = min(CHUNK, tokens - chunk * CHUNK) * (DIM / 8);
  uint4 v[OWN];
  wait_for_inputs();
#pragma unroll
  for (int i = 0; i < OWN; ++i) {
    const int piece = i * THREADS + threadIdx.x;
    v[i] = piece < pieces ? load_input(x + begin + piece) : make_uint4(0, 0, 0, 0);
    v[i] = make_uint4(v[i].x & SIZES, v[i].y & SIZES, v[i].z & SIZES, v[i].w & SIZES);
  }
  u32 limit = quantile_of(v, chunk + 1 == gridDim.x ? last_over : over, sums);
  __syncthreads();
  if (limit == 0) limit = quantile_of(v, 0, sums);
  const float largest = INT8 ? 127.f : 448.f, size = limit ? __uint_as_float(limit << 16) : largest;
  const float inverse = __fdiv_rn(largest, size);
  if (threadIdx.x == 0) scales[chunk] = __fdiv_rn(size, largest);
#pragma unroll
  for (int i = 0; i < OWN; ++i) {
    const int piece = i * THREADS + threadIdx.x;
    if (piece >= pieces) continue;
    const uint4 eight = x[begin + piece];  // again, for the signs: it is in L1 or L2
    const u32 low = code_pair(eight.x, inverse) | code_pair(eight.y, inverse) << 16;
    codes[begin + piece] = make_uint2(low, code_pair(eight.z, inverse) | code_pair(eight.w, inverse) << 16);
  }
}
