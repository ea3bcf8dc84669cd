// FP8 in blocks of 128x128 -> NVFP4, in code space.
//
// A CTA takes one 128x128 tile: 128 threads, each with eight blocks of 16 weights (one 16-byte load a block). Within a tile
// E4M3 codes without their sign are ordered as the weights are, so everything about a block follows from its largest code
// ("top", one of 127): the block scale, and the least code that reaches each of the seven E2M1 steps. These "steps" are
// found once for each top that occurs, with the reference's own float32 operations; then 16 weights cost byte compares.
// A byte compare is a subtraction: (code | 0x80) - step keeps bit 7 exactly where code >= step, and borrows nothing.
//
// Loads and stores go without cache hints: a tile writes 8 of the 32 bytes of a sector of block scales, and L2 has to keep them
// until the tiles beside it have written theirs (evict-first hints cost up to a fifth on an H200).
//
// Compiled by NVRTC: no headers. EXACT=1 leaves out the rounding of dequantised weights to BF16.

#ifndef EXACT
#define EXACT 0
#endif
#ifndef MIN_BLOCKS
#define MIN_BLOCKS 7
#endif

typedef unsigned int u32;
typedef unsigned char u8;

constexpr int BLOCK = 128, GROUP = 16, THREADS = 128, WARPS = THREADS / 32;
constexpr int ROWS_A_PASS = THREADS * GROUP / BLOCK, PASSES = BLOCK / ROWS_A_PASS;
constexpr u32 SIGNS = 0x80808080u;

// Code 0..126 of E4M3 -> float32, exact: the code's bits are a float's, 120 powers of two down.
__device__ __forceinline__ float decode(int code) { return __fmul_rn(__uint_as_float((u32)code << 20), 0x1p120f); }

// Non-negative float -> nearest E4M3 code, ties to even, 448 at most.
__device__ __forceinline__ int encode(float value) {
  value = fminf(value, 448.f);  // NaN too
  if (value < 0x1p-6f) return __float2int_rn(value * 512.f);
  u32 bits = __float_as_uint(value);
  return (int)((bits + 0x7FFFFu + ((bits >> 20) & 1u)) >> 20) - (120 << 3);
}

__device__ __forceinline__ float to_bf16(float value) {
  u32 bits = __float_as_uint(value);
  return __uint_as_float((bits + 0x7FFFu + ((bits >> 16) & 1u)) & 0xFFFF0000u);
}

__device__ __forceinline__ float dequantized(int code, float scale) {
  float value = __fmul_rn(decode(code), scale);
  return EXACT ? value : to_bf16(value);
}

// Least float32 quotient that rounds to E2M1 step 1..7 or beyond: 0.25, 0.75, 1.25, 1.75, 2.5, 3.5 and 5, or the float after
// it where the tie goes down (to the even code).
__constant__ u32 STEP_BITS[7] = {0x3E800001u, 0x3F400000u, 0x3FA00001u, 0x3FE00000u, 0x40200001u, 0x40600000u, 0x40A00001u};

// Least weight > 0 whose float32 quotient by the block's scale rounds to the step or beyond. The quotient reaches a float
// from half its last place below on, or from just after that if the float's last bit is odd; the product is exact in double.
__device__ __forceinline__ float least_weight(int step, float block_scale) {
  const u32 bits = STEP_BITS[step - 1], odd = bits & 1u;
  const double edge = 0.5 * ((double)__uint_as_float(bits) + (double)__uint_as_float(bits - 1)) * (double)block_scale;
  const float weight = odd ? __uint_as_float(__float_as_uint(__double2float_rd(edge)) + 1u) : __double2float_ru(edge);
  return fmaxf(weight, 0x1p-149f);
}

// Least code whose weight is at least `weight`; 127 if none is. Right from any first guess.
__device__ __forceinline__ int least_code(float weight, float scale, float scale_reciprocal) {
  int code = encode(weight * scale_reciprocal);
#pragma unroll 1
  while (code > 0 && dequantized(code - 1, scale) >= weight) --code;
#pragma unroll 1
  while (code < 127 && dequantized(code, scale) < weight) ++code;
  return code;
}

__device__ __forceinline__ int block_scale_code(int top, float scale, float scale_2) {
  float wanted = __fdiv_rn(dequantized(top, scale), __fmul_rn(6.f, scale_2));
  if (wanted == 0.f) wanted = 1.f;
  return max(encode(wanted), 1);
}

// x << 8 on the multiplier, which is idle here (written as a shift, the compiler would add masks to it).
__device__ __forceinline__ u32 byte_up(u32 x) {
#ifdef __CUDA_ARCH__
  u32 shifted;
  asm("mad.lo.u32 %0, %1, 256, 0;" : "=r"(shifted) : "r"(x));
  return shifted;
#else
  return x << 8;
#endif
}

// Largest code of 16, without sign: bytes as the upper halves of 16-bit lanes, odd ones in place, even ones moved there.
__device__ __forceinline__ int top_of(uint4 block) {
  const u32 x = block.x & ~SIGNS, y = block.y & ~SIGNS, z = block.z & ~SIGNS, w = block.w & ~SIGNS;
  u32 top = __vmaxu2(__vmaxu2(x, y), __vmaxu2(z, w));
  top = __vmaxu2(__vmaxu2(top, byte_up(x)), __vmaxu2(byte_up(y), __vmaxu2(byte_up(z), byte_up(w))));
  return (int)(max(top, top << 16) >> 24);
}

// Bits of `a` where the mask is set, of `b` elsewhere: one instruction, which the compiler would split.
__device__ __forceinline__ u32 pick(u32 mask, u32 a, u32 b) {
#ifdef __CUDA_ARCH__
  u32 picked;
  asm("lop3.b32 %0, %1, %2, %3, 0xCA;" : "=r"(picked) : "r"(mask), "r"(a), "r"(b));
  return picked;
#else
  return (a & mask) | (b & ~mask);
#endif
}

__device__ __forceinline__ u32 splat(uint2 steps, int index) { return __byte_perm(steps.x, steps.y, 0x1111u * index); }

// Four codes -> four E2M1 codes, in the upper half of each byte; the lower halves are undefined.
struct Steps {
  u32 step[8], flip;
  __device__ __forceinline__ Steps(uint2 table, u32 least_nonzero, u32 flip_signs) : flip(flip_signs) {
    step[0] = least_nonzero;
#pragma unroll
    for (int i = 1; i < 8; ++i) step[i] = splat(table, i);
  }
  __device__ __forceinline__ u32 operator()(u32 codes) const {
    const u32 size = codes | SIGNS;
    const u32 four = size - step[4];
    const u32 two = (size - step[2]) ^ four ^ (size - step[6]);
    const u32 one = (size - step[1]) ^ (size - step[3]) ^ (size - step[5]) ^ (size - step[7]) ^ two;
    const u32 sign = (codes ^ flip) & (size - step[0]);
    return pick(SIGNS, sign, pick(SIGNS >> 1, four >> 1, pick(SIGNS >> 2, two >> 2, one >> 3)));
  }
};

__device__ __forceinline__ u32 pack(u32 first, u32 second, const Steps& e2m1) {
  const u32 even = e2m1(__byte_perm(first, second, 0x6420)), odd = e2m1(__byte_perm(first, second, 0x7531));
  return pick(0xF0F0F0F0u, odd, even >> 4);
}

// Where this thread's blocks are, counted in blocks: ROWS_A_PASS rows apart. Those beyond the matrix's edge are read as the
// last ones within, which changes nothing (they are in the same tile), and not written.
struct Place {
  int row, rows, column, columns;  // in blocks, as `columns` is
  u32 matrix;
  __device__ __forceinline__ Place(int n, int k) {
    row = blockIdx.y * BLOCK + threadIdx.x / 8, rows = n;
    column = blockIdx.x * 8 + threadIdx.x % 8, columns = k / GROUP;
    matrix = blockIdx.z * (u32)n;
  }
  __device__ __forceinline__ bool holds(int pass) const { return row + pass * ROWS_A_PASS < rows && column < columns; }
  __device__ __forceinline__ u32 block(int pass) const { return (matrix + row + pass * ROWS_A_PASS) * columns + column; }
  __device__ __forceinline__ u32 block_within(int pass) const {
    return (matrix + min(row + pass * ROWS_A_PASS, rows - 1)) * columns + min(column, columns - 1);
  }
};

__device__ __forceinline__ void load(uint4 (&blocks)[PASSES], const u8* codes, const Place& place) {
#pragma unroll
  for (int i = 0; i < PASSES; ++i) blocks[i] = ((const uint4*)codes)[place.block_within(i)];
}

__device__ __forceinline__ float tile_scale(const float* scale_inv) {
  return scale_inv[((size_t)blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x];
}

// codes [B, n, k], scale_inv [B, ceil(n/128), ceil(k/128)] -> amax [B] as float bits, rounded to BF16; zero it before.
extern "C" __global__ void __launch_bounds__(THREADS)
fp8_block_amax(const u8* __restrict__ codes, const float* __restrict__ scale_inv, u32* __restrict__ amax, int n, int k) {
  __shared__ u32 tops[WARPS];
  const int t = threadIdx.x;
  uint4 blocks[PASSES];
  load(blocks, codes, Place(n, k));
  int top = 0;
#pragma unroll
  for (int i = 0; i < PASSES; ++i) top = max(top, top_of(blocks[i]));
  const u32 warp_top = __reduce_max_sync(~0u, (u32)top);
  if (t % 32 == 0) tops[t / 32] = warp_top;
  __syncthreads();
  if (t >= 32) return;
  const int tile_top = (int)__reduce_max_sync(~0u, tops[t % WARPS]);
  const float scale = fabsf(tile_scale(scale_inv)), value = __fmul_rn(decode(tile_top), scale);
  const bool finite = tile_top < 127 && value < __uint_as_float(0x7F800000u);
  if (t == 0) atomicMax(amax + blockIdx.z, finite ? __float_as_uint(to_bf16(value)) : 0x7FC00000u);
}

// amax [B] -> weight [B, n, k/2], weight_scale [B, n, k/16] (E4M3 codes), weight_scale_2 [B]
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
fp8_block_to_nvfp4(const u8* __restrict__ codes, const float* __restrict__ scale_inv, const float* __restrict__ amax,
                   u8* __restrict__ weight, u8* __restrict__ weight_scale, float* __restrict__ weight_scale_2, int n, int k) {
  __shared__ u8 used[BLOCK];
  __shared__ uint2 table[BLOCK];  // of each top: its block scale's code, then steps 1 to 7
  __shared__ int least_nonzero;
  const u32 t = threadIdx.x, matrix = blockIdx.z;
  const Place place(n, k);
  uint4 blocks[PASSES];
  load(blocks, codes, place);
  const float signed_scale = tile_scale(scale_inv), scale = fabsf(signed_scale);
  float scale_2 = __fdiv_rn(amax[matrix], 2688.f);
  if (!(scale_2 > 0.f)) scale_2 = 1.f;
  if (t == 0 && blockIdx.x == 0 && blockIdx.y == 0) weight_scale_2[matrix] = scale_2;
  if (t < BLOCK) used[t] = 0;
  __syncthreads();
  int tops[PASSES];
#pragma unroll
  for (int i = 0; i < PASSES; ++i) used[tops[i] = top_of(blocks[i])] = 1;
  __syncthreads();
  // Of every top that occurs, warp 0 finds the block scale, and warp w the steps w, w + 4. Tops of a tile lie close together,
  // so a lane that looks after one in 32 seldom has two.
  const u32 warp = t / 32, lane = t % 32;
  const float reciprocal = __fdividef(1.f, scale);
  u32 mine = used[lane] | used[lane + 32] << 1 | used[lane + 64] << 2 | used[lane + 96] << 3;
#pragma unroll 1
  for (; mine; mine &= mine - 1) {
    const u32 top = lane + 32 * (__ffs(mine) - 1);
    const int code = block_scale_code(top, scale, scale_2);
    const float block_scale = __fmul_rn(decode(code), scale_2);
    u8* entry = (u8*)(table + top);
    if (warp == 0) entry[0] = (u8)code;
#pragma unroll 1
    for (u32 step = warp ? warp : WARPS; step < 8; step += WARPS)
      entry[step] = (u8)least_code(least_weight(step, block_scale), scale, reciprocal);
  }
  if (t == 0) least_nonzero = least_code(0x1p-149f, scale, reciprocal);
  __syncthreads();
  const u32 nonzero = least_nonzero * 0x01010101u, flip = signed_scale < 0.f ? SIGNS : 0u;
#pragma unroll
  for (int i = 0; i < PASSES; ++i) {
    if (!place.holds(i)) continue;
    const uint2 entry = table[tops[i]];
    const Steps e2m1(entry, nonzero, flip);
    const uint2 packed = make_uint2(pack(blocks[i].x, blocks[i].y, e2m1), pack(blocks[i].z, blocks[i].w, e2m1));
    ((uint2*)weight)[place.block(i)] = packed;
    weight_scale[place.block(i)] = (u8)entry.x;
  }
}
