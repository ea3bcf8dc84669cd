// Codes of an FP8 cache to FP16, between registers, for `sm90_kernel.cu`.

// At most FP16's largest number; fminf and fmaxf would make one of NaN.
__device__ __forceinline__ float within(float value) { return value != value ? value : fminf(fmaxf(value, -65504.f), 65504.f); }

// Two BF16 -> two FP16.
__device__ __forceinline__ u32 to_operands(u32 pair) { return operand_pair(within(first_of(pair)), within(second_of(pair))); }

// One thread: a block's rows, which follow each other in the cache, are brought into the L2.
__device__ __forceinline__ void prefetch(const char* cache, int row) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(cache + (size_t)row * DIM), "r"(TOKENS * DIM) : "memory");
}

// A thread's part of half a block's codes, of 64 threads': sixteen of lines `line` + 16 i of each tile.
struct Codes { uint4 latent[16], rope[4]; };

// Where that is in a row of the cache from the first line on, and in a tile what becomes of its first eight codes, and of the rest.
struct Place {
  int column;
  u32 low, high;
  __device__ __forceinline__ Place(u32 tile) {
    const int line = threadIdx.x % 64 / 4, piece = threadIdx.x % 4 * 2;
    column = line * DIM + piece * 8;
    low = tile + line * 128 + ((piece ^ line % 8) << 4), high = tile + line * 128 + ((piece + 1 ^ line % 8) << 4);
  }
};

// Sixteen codes, which nobody on this multiprocessor reads again. As of a value that others may write, or the compiler would load
// behind the wait that it should be on its way during.
__device__ __forceinline__ uint4 load_codes(const char* from) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
  return v;
}

__device__ __forceinline__ void fetch(Codes& codes, const char* from, int half) {
#pragma unroll
  for (int i = 0; i < 16; ++i) codes.latent[i] = load_codes(from + half * 256 + i % 4 * 16 * DIM + i / 4 * 64);
}

__device__ __forceinline__ void fetch_rope(Codes& codes, const char* from) {
#pragma unroll
  for (int i = 0; i < 4; ++i) codes.rope[i] = load_codes(from + i * 16 * DIM + LATENT);
}

// Two E4M3 codes -> two FP16, exactly.
__device__ __forceinline__ u32 expanded(u32 codes) {
  u32 pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"((u16)codes));
  return pair;
}

__device__ __forceinline__ void store_shared(u32 to, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" :: "r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// Sixteen codes to where the matrix instructions look for them, `offset` from the place.
__device__ __forceinline__ void store_expanded(const Place& at, u32 offset, uint4 v) {
  store_shared(at.low + offset, expanded(v.x), expanded(v.x >> 16), expanded(v.y), expanded(v.y >> 16));
  store_shared(at.high + offset, expanded(v.z), expanded(v.z >> 16), expanded(v.w), expanded(v.w >> 16));
}
