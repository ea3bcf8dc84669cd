// What both kernels of the routing share.

// Unsigned integers that are ordered as the floats are, with NaN on top as in torch.sort.
__device__ __forceinline__ u32 key_of(float value) {
  const u32 bits = __float_as_uint(value);
  return bits ^ ((u32)((int)bits >> 31) | 0x80000000u);
}

__device__ __forceinline__ float value_of(u32 key) { return __uint_as_float(key ^ ((key >> 31) ? 0x80000000u : 0xFFFFFFFFu)); }

// A power below 2^-126 is zero: added to 1, it would be lost.
__device__ __forceinline__ float sigmoid(float x) {
#ifdef __CUDA_ARCH__
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * -1.4426950408889634f));
#else
  const float power = __expf(-x);
#endif
  return __fdividef(1.f, 1.f + power);
}

// The two largest of two such pairs.
template <class Number>
__device__ __forceinline__ void merge(Number& first, Number& second, Number other_first, Number other_second) {
  second = max(min(first, other_first), max(second, other_second));
  first = max(first, other_first);
}

// COUNT consecutive words from `from`, 16 bytes at a time where COUNT allows.
template <int COUNT, class Word>
__device__ __forceinline__ void copy(Word* to, const Word* from) {
  if constexpr (COUNT % 4 == 0) {
#pragma unroll
    for (int i = 0; i < COUNT / 4; ++i) ((uint4*)to)[i] = ((const uint4*)from)[i];
  } else {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) to[i] = from[i];
  }
}
