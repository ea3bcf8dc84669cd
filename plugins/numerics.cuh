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

// The same, but the next kernel begins when all before this one is complete: that it may read before it waits.
__device__ __forceinline__ void wait_before_next() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// 16 bytes that the kernel before may be writing until `wait_for_inputs`: the compiler moves loads through `const __restrict__`
// pointers ahead of it, but not this one.
__device__ __forceinline__ uint4 load_input(const void* from) {
#ifdef __CUDA_ARCH__
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
  return v;
#else
  return *(const uint4*)from;
#endif
}

// The same of bytes that are read once: not kept in L1.
__device__ __forceinline__ uint4 load_once(const void* from) {
#ifdef __CUDA_ARCH__
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
  return v;
#else
  return *(const uint4*)from;
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

// Eight BF16 times `factor` -> their E4M3 codes, the first in the lowest byte.
__device__ __forceinline__ uint2 e4m3_codes(uint4 v, float factor) {
  const u32 words[4] = {v.x, v.y, v.z, v.w};
  u32 pairs[4];
#pragma unroll
  for (int w = 0; w < 4; ++w) pairs[w] = e4m3_pair(first_of(words[w]) * factor, second_of(words[w]) * factor);
  return make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
}

__device__ __forceinline__ float decode_e4m3(u32 code) {
  const float value = __uint_as_float((code & 0x7Fu) << 20 | (code & 0x80u) << 24) * 0x1p120f;
  return (code & 0x7Fu) == 0x7Fu ? __uint_as_float(0x7FFFFFFFu) : value;
}

// A size of at least 0 -> its E2M1 code (0, 1/2, 1, 3/2, 2, 3, 4, 6; ties to the even code; NaN too is 6) + 0x4B000000. Codes count
// halves up to 2, ones from 2 (code 4) to 4, twos from 4 (code 6) on: the least of the three, each rounded by adding 2^23.
__device__ __forceinline__ u32 e2m1_steps(float size) {
  const float halves = fmaf(size, 2.f, 0x1p23f), ones = size + (0x1p23f + 2.f), twos = fmaf(size, 0.5f, 0x1p23f + 4.f);
  return min(min(__float_as_uint(halves), __float_as_uint(ones)), min(__float_as_uint(twos), 0x4B000007u));
}

// Eight BF16 times `factor`, of which NaN makes all 6 -> their E2M1 codes, the first in the lowest bits.
__device__ __forceinline__ u32 e2m1_codes(uint4 v, float factor) {
  const u32 words[4] = {v.x, v.y, v.z, v.w};
  u32 codes = 0;
#pragma unroll
  for (int w = 3; w >= 0; --w) {
    const u32 sizes = words[w] & 0x7FFF7FFFu;
    codes = (codes << 4) + e2m1_steps(second_of(sizes) * factor);
    codes = (codes << 4) + e2m1_steps(first_of(sizes) * factor);
  }
  const u32 first_signs = __byte_perm(__byte_perm(v.x, v.y, 0x51), __byte_perm(v.z, v.w, 0x51), 0x5410);
  const u32 second_signs = __byte_perm(__byte_perm(v.x, v.y, 0x73), __byte_perm(v.z, v.w, 0x73), 0x5410);
  const u32 signs = (first_signs >> 4 & 0x08080808u) | (second_signs & 0x80808080u);
  return (codes - 0xFB000000u) | (factor == factor ? signs : 0u);
}

__device__ __forceinline__ float decode_e2m1(u32 code) {
  return __uint_as_float((code & 7u) << 22 | (code & 8u) << 28) * 0x1p126f;
}

// Largest of the values of LANES neighbours in a warp.
template <int LANES>
__device__ __forceinline__ u32 group_top(u32 top) {
#pragma unroll
  for (int distance = 1; distance < LANES; distance *= 2) top = max(top, __shfl_xor_sync(~0u, top, distance));
  return top;
}

constexpr u32 LEAST_AMAX = 0x2F00;  // 2^-33 in BF16: groups of zeros must not divide by zero

// 1 / x, off by 2 units in the last place at most.
__device__ __forceinline__ float near_reciprocal(float x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return 1.f / x;
#endif
}

// dividend / divisor, rounded as a division is, from a near reciprocal and without its branches, which are most of a short kernel's
// code: what the near quotient leaves corrects it (Markstein). Tested for what Fp8Group divides; a divisor without end gives 0.
__device__ __forceinline__ float divided(float dividend, float divisor, float reciprocal) {
  const float near = dividend * reciprocal;
  const float corrected = fmaf(fmaf(-near, divisor, dividend), reciprocal, near);
  return corrected == corrected ? corrected : near;
}

// A group that shares a scale, from its largest magnitude as BF16 bits.
struct Fp8Group {
  float amax;
  __device__ __forceinline__ Fp8Group(u32 top) : amax(__uint_as_float(max(top, LEAST_AMAX) << 16)) {}
  __device__ __forceinline__ float scale() const { return divided(amax, 448.f, 1.f / 448.f); }
  __device__ __forceinline__ uint2 codes(uint4 v) const {  // of eight BF16
    const float sixteenth = amax * 0x1p-4f;  // whose reciprocal is no denormal number
    const float inverse = divided(28.f, sixteenth, near_reciprocal(sixteenth));
    return e4m3_codes(v, inverse);
  }
};
