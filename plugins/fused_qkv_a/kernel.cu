// q_a norm, latent norm, RoPE of the key and the write into the latent KV cache: a CTA a token, 8 values a thread.
//
// Threads 0.. hold q, whole warps, then as many whole warps the latent, then the first lanes of the last warp the rope key. Every
// thread loads its 16 bytes and what it will multiply them with before it uses any: the time is that of two loads one after
// the other and one barrier. Compiled by NVRTC: Q, LATENT, ROPE; FP8 (the cache is E4M3, else BF16).

#include "../numerics.cuh"

constexpr int Q_THREADS = Q / 8, KV_THREADS = LATENT / 8, ROPE_THREADS = ROPE / 8;
constexpr int NORM_WARPS = (Q_THREADS + KV_THREADS) / 32, THREADS = NORM_WARPS * 32 + 32, DIM = LATENT + ROPE;

static_assert(Q % 256 == 0 && LATENT % 256 == 0 && ROPE % 8 == 0 && ROPE <= 256, "q and latent must fill warps, rope fit in one");

__device__ __forceinline__ void unpack(float (&values)[8], uint4 v) {
  const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int w = 0; w < 4; ++w) values[2 * w] = first_of(words[w]), values[2 * w + 1] = second_of(words[w]);
}

// x / rms * weight, with BF16 in between; two at a time.
__device__ __forceinline__ u32 normed(float first, float second, float factor, u32 weights) {
  const u32 rounded = bf16_pair(__fmul_rn(first, factor), __fmul_rn(second, factor));
  return bf16_pair(first_of(rounded) * first_of(weights), second_of(rounded) * second_of(weights));
}

__device__ __forceinline__ u32 fp8_pair(u32 pair, float inverse) {
  return e4m3_pair(first_of(pair) * inverse, second_of(pair) * inverse);
}

// COUNT words of two BF16 each to column `column` of a cache row.
template <int COUNT>
__device__ __forceinline__ void store(u8* row, int column, const u32 (&words)[COUNT], float inverse) {
#if FP8
#pragma unroll
  for (int w = 0; w < COUNT; w += 2)
    *(u32*)(row + column + w * 2) = fp8_pair(words[w], inverse) | fp8_pair(words[w + 1], inverse) << 16;
#else
#pragma unroll
  for (int w = 0; w < COUNT; w += 2) *(uint2*)(row + 2 * column + w * 4) = make_uint2(words[w], words[w + 1]);
#endif
}

// This lane's four pairs, turned: the first elements to column 4 * lane, the second ones half a rope on.
__device__ __forceinline__ void rotate(u8* row, const float (&x)[8], const float* cos_sin, int lane, float inverse) {
  const float4 cos = *(const float4*)(cos_sin + 4 * lane), sin = *(const float4*)(cos_sin + ROPE / 2 + 4 * lane);
  const float c[4] = {cos.x, cos.y, cos.z, cos.w}, s[4] = {sin.x, sin.y, sin.z, sin.w};
  float first[4], second[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    first[i] = __fmul_rn(x[2 * i], c[i]) - __fmul_rn(x[2 * i + 1], s[i]);
    second[i] = __fmul_rn(x[2 * i + 1], c[i]) + __fmul_rn(x[2 * i], s[i]);
  }
  const u32 low[2] = {bf16_pair(first[0], first[1]), bf16_pair(first[2], first[3])};
  const u32 high[2] = {bf16_pair(second[0], second[1]), bf16_pair(second[2], second[3])};
  store(row, LATENT + 4 * lane, low, inverse);
  store(row, LATENT + ROPE / 2 + 4 * lane, high, inverse);
}

// qkv [N, Q + LATENT + ROPE], cos_sin [positions, ROPE] -> q_a [N, Q], cache[slots[n]]. What the kernel before may be writing is not
// __restrict__: it would be loaded before the wait.
extern "C" __global__ void __launch_bounds__(THREADS)
norm_rope_cache(const uint4* qkv, const uint4* __restrict__ q_norm, const uint4* __restrict__ kv_norm,
                const float* __restrict__ cos_sin, const int* positions, const long long* slots, u8* cache, uint4* q_a, float eps,
                float inverse) {
  __shared__ float sums[NORM_WARPS];
  const int t = threadIdx.x, token = blockIdx.x;
  const bool is_q = t < Q_THREADS, is_rope = t >= Q_THREADS + KV_THREADS, idle = t >= Q_THREADS + KV_THREADS + ROPE_THREADS;
  uint4 gain = make_uint4(0, 0, 0, 0), v = gain;
  if (!is_rope) gain = is_q ? q_norm[t] : kv_norm[t - Q_THREADS];
  wait_for_inputs();
  if (!idle) v = qkv[(size_t)token * ((Q + DIM) / 8) + t];
  const long long slot = slots[token];
  u8* row = cache + slot * DIM * (FP8 ? 1 : 2);
  float x[8], sum = 0.f;
  unpack(x, v);
#pragma unroll
  for (int i = 0; i < 8; ++i) sum = fmaf(x[i], x[i], sum);
#pragma unroll
  for (int distance = 16; distance; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
  if (!is_rope && t % 32 == 0) sums[t / 32] = sum;
  if (is_rope && !idle && slot >= 0) rotate(row, x, cos_sin + (size_t)positions[token] * ROPE, t - Q_THREADS - KV_THREADS, inverse);
  __syncthreads();
  if (is_rope) return;
  float all = 0.f;
#pragma unroll
  for (int warp = 0; warp < NORM_WARPS; ++warp) all += (warp < Q_THREADS / 32) == is_q ? sums[warp] : 0.f;
  const float factor = rsqrtf(all / (is_q ? (float)Q : (float)LATENT) + eps);
  const u32 weights[4] = {gain.x, gain.y, gain.z, gain.w};
  u32 out[4];
#pragma unroll
  for (int w = 0; w < 4; ++w) out[w] = normed(x[2 * w], x[2 * w + 1], factor, weights[w]);
  if (is_q) q_a[(size_t)token * Q_THREADS + t] = make_uint4(out[0], out[1], out[2], out[3]);
  else if (slot >= 0) store(row, 8 * (t - Q_THREADS), out, inverse);
}
