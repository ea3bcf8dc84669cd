// What follows attention by several CTAs, or by another library: its parts are joined, and rows that see no token become zeros.
// Compiled by NVRTC: AT_ONCE, parts that are on their way at a time.

#include "../numerics.cuh"

constexpr int LATENT = 512, THREADS = LATENT / 4;

__device__ __forceinline__ float none() { return __uint_as_float(0xFF800000u); }  // -inf

// part F32 [rows, splits, LATENT], lse F32 [rows, splits] (-inf: nothing) -> out BF16 [rows, LATENT], total. A CTA a row, four
// columns a thread.
extern "C" __global__ void __launch_bounds__(THREADS, AT_ONCE > 4 ? 8 : 12)
mla_combine(const float4* __restrict__ part, const float* __restrict__ lse, uint2* __restrict__ out, float* __restrict__ total,
            int splits) {
  wait_for_inputs();
  const size_t row = blockIdx.x;
  float top = none(), sum = 0.f, o[4] = {};
#pragma unroll 1
  for (int first = 0; first < splits; first += AT_ONCE) {
    float own[AT_ONCE], next = top;
    float4 v[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) own[i] = first + i < splits ? lse[row * splits + first + i] : none();
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      v[i] = own[i] == none() ? float4{} : part[(row * splits + first + i) * THREADS + threadIdx.x];
      next = fmaxf(next, own[i]);
    }
    const float base = next == none() ? 0.f : next, kept = expf(top - base);
    sum *= kept, o[0] *= kept, o[1] *= kept, o[2] *= kept, o[3] *= kept, top = next;
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const float weight = expf(own[i] - base);
      sum += weight, o[0] += weight * v[i].x, o[1] += weight * v[i].y, o[2] += weight * v[i].z, o[3] += weight * v[i].w;
    }
  }
  const float factor = sum == 0.f ? 0.f : 1.f / sum;
  out[row * THREADS + threadIdx.x] = make_uint2(bf16_pair(o[0] * factor, o[1] * factor), bf16_pair(o[2] * factor, o[3] * factor));
  if (threadIdx.x == 0) total[row] = sum == 0.f ? none() : top + logf(sum);
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
