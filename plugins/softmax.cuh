// A running softmax over the scores that `wgmma.cuh` leaves in a warpgroup: two rows a thread, their elements shared by four lanes.

constexpr float NONE = -1e30f;  // the largest score of nothing
constexpr float LN2 = 0.6931471805599453f;

// The natural logarithm of a row's sum; -inf of nothing.
__device__ __forceinline__ float natural(float top, float scale, float sum) {
  return sum == 0.f ? __uint_as_float(0xFF800000u) : (top * scale + log2f(sum)) * LN2;
}

// Two floats as the products' operands: BF16, or FP16 where codes of an FP8 cache are multiplied, which has all of E4M3's values.
__device__ __forceinline__ u32 operand_pair(float first, float second) {
#if FP8
  u32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
#else
  return bf16_pair(first, second);
#endif
}

// The same, times a factor.
__device__ __forceinline__ u32 operand_times(u32 pair, float factor) {
#if FP8
  float first, second;
  asm("{ .reg .f16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }" : "=f"(first), "=f"(second) : "r"(pair));
  return operand_pair(first * factor, second * factor);
#else
  return operand_pair(first_of(pair) * factor, second_of(pair) * factor);
#endif
}

// The largest of this thread's two rows and of what `top` holds.
template <int N>
__device__ __forceinline__ void largest(const float (&s)[N], float (&top)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int j = 0; j < N / 4; ++j) top[half] = fmaxf(top[half], fmaxf(s[4 * j + 2 * half], s[4 * j + 2 * half + 1]));
    top[half] = fmaxf(top[half], __shfl_xor_sync(~0u, top[half], 1));
    top[half] = fmaxf(top[half], __shfl_xor_sync(~0u, top[half], 2));
  }
}

// A scale of all rows, or of each of a thread's two.
__device__ __forceinline__ float of(float scale, int) { return scale; }
__device__ __forceinline__ float of(const float (&scale)[2], int half) { return scale[half]; }

// The largest score may stay what it was `before` while weights are 2^`most` at most: then sums need not be rescaled.
template <class Scale>
__device__ __forceinline__ void settle(float (&top)[2], const float (&before)[2], const Scale& scale, float most = 8.f) {
#pragma unroll
  for (int half = 0; half < 2; ++half)
    if ((top[half] - before[half]) * of(scale, half) <= most) top[half] = before[half];
}

// Scores -> weights, 2^`raised` of the largest, and this thread's part of their sums.
template <int N, class Scale>
__device__ __forceinline__ void weigh(float (&s)[N], const float (&top)[2], const Scale& scale, float (&sum)[2], float raised = 0.f) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float factor = of(scale, half), offset = top[half] * factor - raised;
#pragma unroll
    for (int j = 0; j < N / 2; ++j) {
      float& weight = s[j / 2 * 4 + 2 * half + j % 2];
      weight = exp2_fast(weight * factor - offset);
      sum[half] += weight;
    }
  }
}

// Weights as the first operand of N / 8 steps.
template <int N>
__device__ __forceinline__ void round_weights(const float (&s)[N], u32 (&weights)[N / 8][4]) {
#pragma unroll
  for (int i = 0; i < N / 2; ++i) weights[i / 4][i % 4] = operand_pair(s[2 * i], s[2 * i + 1]);
}

// What sums are to be multiplied with when the largest score was `before` and is `now`.
template <class Scale>
__device__ __forceinline__ void factors(float (&factor)[2], const float (&before)[2], const float (&now)[2], const Scale& scale) {
  factor[0] = exp2_fast((before[0] - now[0]) * of(scale, 0)), factor[1] = exp2_fast((before[1] - now[1]) * of(scale, 1));
}

// Most often there is no larger score, and nothing to do.
template <int N>
__device__ __forceinline__ void rescale(float (&o)[N], const float (&factor)[2]) {
  if (!__any_sync(~0u, factor[0] != 1.f || factor[1] != 1.f)) return;
#pragma unroll
  for (int i = 0; i < N; ++i) o[i] *= factor[i / 2 % 2];
}

template <int N>
__device__ __forceinline__ void rescale(float (&o)[N], float (&sum)[2], const float (&factor)[2]) {
  rescale(o, factor);
  sum[0] *= factor[0], sum[1] *= factor[1];
}
