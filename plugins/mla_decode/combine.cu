// What follows attention by several CTAs, or by another library: its parts are joined, and rows that see no token become zeros.

#include "../numerics.cuh"

constexpr int LATENT = 512, THREADS = LATENT / 4;

__device__ __forceinline__ float none() { return __uint_as_float(0xFF800000u); }  // -inf

// part F32 [rows, splits, LATENT], lse F32 [rows, splits] (-inf: nothing) -> out BF16 [rows, LATENT], total. A CTA a row, four
// columns a thread.
extern "C" __global__ void __launch_bounds__(THREADS)
mla_combine(const float4* __restrict__ part, const float* __restrict__ lse, uint2* __restrict__ out, float* __restrict__ total,
            int splits) {
  wait_for_inputs();
  const size_t row = blockIdx.x;
  float top = none(), sum = 0.f, o[4] = {};
  for (int split = 0; split < splits; ++split) top = fmaxf(top, lse[row * splits + split]);
  for (int split = 0; split < splits; ++split) {
    const float own = lse[row * splits + split];
    if (own == none()) continue;
    const float weight = expf(own - top);
    const float4 v = part[(row * splits + split) * THREADS + threadIdx.x];
    sum += weight, o[0] += weight * v.x, o[1] += weight * v.y, o[2] += weight * v.z, o[3] += weight * v.w;
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
