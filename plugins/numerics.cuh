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

// 16 bytes that are read once: not kept in L1, and whole 256 bytes at a time from memory.
__device__ __forceinline__ uint4 load_once(const void* from) {
#ifdef __CUDA_ARCH__
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
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

__device__ __forceinline__ float decode_e4m3(u32 code) {
  const float value = __uint_as_float((code & 0x7Fu) << 20 | (code & 0x80u) << 24) * 0x1p120f;
  return (code & 0x7Fu) == 0x7Fu ? __uint_as_float(0x7FFFFFFFu) : value;
}

// float32 -> E2M1, ties to the even code, at most 6 in size (NaN too). Adding 2^22 times the value's power of two (at least 1)
// rounds to a mantissa of one bit, or to halves below 1; each power of two is two codes further.
__device__ __forceinline__ u32 e2m1(float value) {
  const float size = fminf(fabsf(value), 6.f);
  const u32 power = max(__float_as_uint(size) & 0x7F800000u, 0x3F800000u), large = power + (22u << 23);
  const u32 steps = __float_as_uint(size + __uint_as_float(large)) - large;
  return (steps + (power >> 22) - 254u) | (__float_as_uint(value) >> 28 & 8u);
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

// A group that shares a scale, from its largest magnitude as BF16 bits.
struct Fp8Group {
  float amax;
  __device__ __forceinline__ Fp8Group(u32 top) : amax(__uint_as_float(max(top, LEAST_AMAX) << 16)) {}
  __device__ __forceinline__ float scale() const { return __fdiv_rn(amax, 448.f); }
  __device__ __forceinline__ uint2 codes(uint4 v) const {  // of eight BF16
    const float inverse = __fdiv_rn(448.f, amax);
    const u32 words[4] = {v.x, v.y, v.z, v.w};
    u32 pairs[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) pairs[w] = e4m3_pair(first_of(words[w]) * inverse, second_of(words[w]) * inverse);
    return make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
  }
};
