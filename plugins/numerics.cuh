// Number formats and the launch protocol that kernels share. `plugins.nvrtc` pastes it into the source that includes it.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

// Until here a kernel may run while the one before it on the stream still does, and the next one may begin.
__device__ __forceinline__ void wait_for_inputs() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The two BF16 of a word, the first in the lower half; exact.
__device__ __forceinline__ float first_of(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float second_of(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }

// float32 -> BF16 bits, ties to even; NaN stays one.
__device__ __forceinline__ u32 bf16_bits(float value) {
  const u32 bits = __float_as_uint(value);
  return value != value ? 0x7FFFu : (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
}

// Two floats -> a word of two BF16.
__device__ __forceinline__ u32 bf16_pair(float first, float second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
#else
  return bf16_bits(first) | bf16_bits(second) << 16;
#endif
}

// Largest magnitude of 8 BF16, as BF16 bits: NaN above infinity above numbers.
__device__ __forceinline__ u32 top_of(uint4 v) {
  const u32 sizes = 0x7FFF7FFFu;
  const u32 top = __vmaxu2(__vmaxu2(v.x & sizes, v.y & sizes), __vmaxu2(v.z & sizes, v.w & sizes));
  return max(top >> 16, top & 0xFFFFu);
}

// float32 -> E4M3, ties to even, at most 448 in size; NaN is 0x7F.
__device__ __forceinline__ u32 e4m3(float value) {
  if (value != value) return 0x7Fu;
  const u32 sign = __float_as_uint(value) >> 31 << 7;
  const float size = fminf(fabsf(value), 448.f);
  if (size < 0x1p-6f) return sign | (u32)__float2int_rn(size * 512.f);
  const u32 bits = __float_as_uint(size);
  return sign | (((bits + 0x7FFFFu + ((bits >> 20) & 1u)) >> 20) - (120u << 3));
}

// Two floats -> two E4M3 codes, the first in the lower byte.
__device__ __forceinline__ u32 e4m3_pair(float first, float second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  u16 pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
  return pair;
#else
  return e4m3(first) | e4m3(second) << 8;
#endif
}

__device__ __forceinline__ float decode_e4m3(u32 code) {
  const float value = __uint_as_float((code & 0x7Fu) << 20 | (code & 0x80u) << 24) * 0x1p120f;
  return (code & 0x7Fu) == 0x7Fu ? __uint_as_float(0x7FFFFFFFu) : value;
}

// float32 -> E2M1, ties to the even code, at most 6 in size (NaN too). Adding 2^22 rounds to halves, 2^23 to ones, 2^24 to
// twos: the step of each range. Where a step is not a range's own, its code is the larger.
__device__ __forceinline__ u32 e2m1(float value) {
  const float size = fabsf(value);
  const u32 halves = __float_as_uint(size + 0x1p22f) - 0x4A800000u;
  const u32 ones = __float_as_uint(size + 0x1p23f) - (0x4B000000u - 2u);
  const u32 twos = __float_as_uint(size + 0x1p24f) - (0x4B800000u - 4u);
  return min(min(halves, ones), min(twos, 7u)) | __float_as_uint(value) >> 31 << 3;
}

__device__ __forceinline__ float decode_e2m1(u32 code) {
  return __uint_as_float((code & 7u) << 22 | (code & 8u) << 28) * 0x1p126f;
}
