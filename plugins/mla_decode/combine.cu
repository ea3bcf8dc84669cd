// Joins the parts of a sequence that several CTAs attended to: a CTA a row, four columns a thread. The next kernel of `mla_decode`.
//
// part F32 [rows, splits, LATENT], lse F32 [rows, splits] in powers of two (-1e30: nothing) -> out BF16 [rows, LATENT], total

#include "../numerics.cuh"

constexpr int LATENT = 512, THREADS = LATENT / 4;
constexpr float NONE = -1e30f;

extern "C" __global__ void __launch_bounds__(THREADS)
mla_combine(const float4* __restrict__ part, const float* __restrict__ lse, uint2* __restrict__ out, float* __restrict__ total,
            int splits) {
  wait_for_inputs();
  const size_t row = blockIdx.x;
  float top = NONE, sum = 0.f, o[4] = {};
  for (int split = 0; split < splits; ++split) top = fmaxf(top, lse[row * splits + split]);
  for (int split = 0; split < splits; ++split) {
    const float own = lse[row * splits + split];
    if (own <= NONE) continue;
    const float weight = exp2f(own - top);
    const float4 v = part[(row * splits + split) * THREADS + threadIdx.x];
    sum += weight, o[0] += weight * v.x, o[1] += weight * v.y, o[2] += weight * v.z, o[3] += weight * v.w;
  }
  const float factor = sum > 0.f ? 1.f / sum : 0.f;
  out[row * THREADS + threadIdx.x] = make_uint2(bf16_pair(o[0] * factor, o[1] * factor), bf16_pair(o[2] * factor, o[3] * factor));
  if (threadIdx.x == 0) total[row] = sum > 0.f ? top + log2f(sum) : NONE;
}
