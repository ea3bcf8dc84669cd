// What follows attention by several CTAs, or by another library: its parts are joined, and rows that see no token become zeros.
// Compiled by NVRTC: AT_ONCE, parts that a group of threads has on their way at a time, and GROUPS of them a row.

#include "../numerics.cuh"

constexpr int LATENT = 512, COLUMNS = LATENT / 4, THREADS = GROUPS * COLUMNS;  // four columns a thread

__device__ __forceinline__ float none() { return __uint_as_float(0xFF800000u); }  // -inf

// Weighted values, and the sum of their weights, as multiples of exp(top).
struct Sums {
  float top, sum;
  float4 o;
  __device__ __forceinline__ void rise(float next) {
    const float base = next == none() ? 0.f : next, kept = expf(top - base);
    sum *= kept, o.x *= kept, o.y *= kept, o.z *= kept, o.w *= kept, top = next;
  }
  // Of others' `count` weights times exp(other): not above `top`, to which this has risen.
  __device__ __forceinline__ void add(float other, float count, float4 v) {
    const float weight = expf(other - (top == none() ? 0.f : top));
    sum += weight * count, o.x += weight * v.x, o.y += weight * v.y, o.z += weight * v.z, o.w += weight * v.w;
  }
};

// part F32 [rows, splits, LATENT], lse F32 [rows, splits] (-inf: nothing, and the part may hold anything) -> out BF16 [rows, LATENT],
// total. A CTA a row.
extern "C" __global__ void __launch_bounds__(THREADS, (AT_ONCE > 4 ? 8 : 12) / GROUPS)
mla_combine(const float4* __restrict__ part, const float* __restrict__ lse, uint2* __restrict__ out, float* __restrict__ total,
            int splits) {
  wait_for_inputs();
  __shared__ Sums shared[GROUPS][COLUMNS];
  const size_t row = blockIdx.x;
  const int group = threadIdx.x / COLUMNS, column = threadIdx.x % COLUMNS;
  Sums sums{none(), 0.f, {}};
#pragma unroll 1
  for (int first = group * AT_ONCE; first < splits; first += GROUPS * AT_ONCE) {
    float own[AT_ONCE], top = sums.top;
    float4 v[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const size_t place = row * splits + min(first + i, splits - 1);
      own[i] = lse[place], v[i] = part[place * COLUMNS + column];
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      if (first + i >= splits) own[i] = none();
      if (own[i] == none()) v[i] = float4{};
      top = fmaxf(top, own[i]);
    }
    sums.rise(top);
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) sums.add(own[i], 1.f, v[i]);
  }
  if (GROUPS > 1) {
    shared[group][column] = sums;
    __syncthreads();
    if (group) return;
#pragma unroll
    for (int other = 1; other < GROUPS; ++other) {
      const Sums& more = shared[other][column];
      sums.rise(fmaxf(sums.top, more.top));
      sums.add(more.top, more.sum, more.o);
    }
  }
  const float factor = sums.sum == 0.f ? 0.f : 1.f / sums.sum;
  out[row * COLUMNS + column] =
      make_uint2(bf16_pair(sums.o.x * factor, sums.o.y * factor), bf16_pair(sums.o.z * factor, sums.o.w * factor));
  if (column == 0) total[row] = sums.sum == 0.f ? none() : sums.top + logf(sums.sum);
}

// lengths I32 [sequences]; out BF16 [sequences, q_tokens, heads, LATENT] and lse F32 [sequences, q_tokens, heads], of which queries
// before the first token are cleared. A CTA a query.
extern "C" __global__ void __launch_bounds__(THREADS)
mla_clear(const int* __restrict__ lengths, uint4* __restrict__ out, float* __restrict__ lse, int q_tokens, int heads) {
  wait_for_inputs();
  const size_t row = blockIdx.x;
  if (lengths[row / q_tokens] >= q_tokens - (int)(row % q_tokens)) return;
  for (int i = threadIdx.x; i < heads * LATENT / 8; i += THREADS) out[row * heads * LATENT / 8 + i] = make_uint4(0, 0, 0, 0);
  for (int i = threadIdx.x; i < heads; i += THREADS) lse[row * heads + i] = none();
}
