// A head's product of tokens with its weight, on Hopper, half of the weight's columns a CTA: 256 CTAs of R1's 128 heads are a wave.
//
// OUTPUT 0: x [T, heads, 128 + 64] -> [T, heads, 512 + 64]: x's first 128 columns times weight [heads, 128, 512] | its last 64
// OUTPUT 1: x [T, heads, 512] -> [T, heads, 128]: times weight [heads, 128, 512]^T
//
// The weight is loaded once, before the kernel in front has ended, and stays in shared memory; one warp's thread copies x in
// pieces of 64 tokens and 128 columns, four warps multiply. Compiled by NVRTC for sm_90a: OUTPUT.

#include "../numerics.cuh"
#include "../wgmma.cuh"

constexpr int TOKENS = 64, TILE = 64 * 128, STAGES = 2, CONSUMERS = 128, THREADS = CONSUMERS + 32;
constexpr int NOPE = 128, ROPE = 64, LATENT = 512;
constexpr int PIECES = OUTPUT ? LATENT / 128 : 1;  // of x that 64 tokens are
constexpr int COLUMNS = OUTPUT ? 64 : 256, WIDTH = OUTPUT ? NOPE : LATENT + ROPE;  // of a CTA, and of all results
constexpr int SUMS = COLUMNS / 2, PARTS = OUTPUT ? 4 : 2;  // of the weight, by what of x they are multiplied with

struct Shared {
  char weight[8 * TILE], x[STAGES][2 * TILE];
  u64 weight_full[PARTS], full[STAGES], empty[STAGES];
};

struct Work {
  int head, half, tokens;
  __device__ __forceinline__ int tiles() const { return (tokens + TOKENS - 1) / TOKENS; }
};

// Tiles of 64 rows and columns: of 64 rows and 512 columns, or 128 rows and 256 columns.
__device__ __forceinline__ void load_weight(Shared& shared, const TensorMap* weight, int row, int half) {
  constexpr int TILES = 8 / PARTS;
#pragma unroll
  for (int part = 0; part < PARTS; ++part) {
    barrier_expect(&shared.weight_full[part], TILES * TILE);
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
      const int column = i * 64 + (OUTPUT ? part * 128 : half * COLUMNS), first = OUTPUT ? half * COLUMNS : part * 64;
      copy_tile(shared_address(shared.weight) + (part * TILES + i) * TILE, weight, column, row + first, &shared.weight_full[part]);
    }
  }
}

__device__ __forceinline__ void produce(Shared& shared, const TensorMap* x, int column, const Work& work) {
  for (int piece = 0; piece < work.tiles() * PIECES; ++piece) {
    const int stage = piece % STAGES, token = piece / PIECES * TOKENS, first = column + piece % PIECES * 128;
    barrier_wait(&shared.empty[stage], (piece / STAGES + 1) & 1);
    barrier_expect(&shared.full[stage], 2 * TILE);
    copy_tile(shared_address(shared.x[stage]), x, first, token, &shared.full[stage]);
    copy_tile(shared_address(shared.x[stage]) + TILE, x, first + 64, token, &shared.full[stage]);
  }
}

// Adds the product of a piece of x with the weight's part of it.
__device__ __forceinline__ void multiply(Shared& shared, float (&sums)[SUMS], int stage, int part) {
  const u64 x = descriptor(shared_address(shared.x[stage]), 16);
  const u32 weight = shared_address(shared.weight);
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
    barrier_wait(&shared.weight_full[OUTPUT ? part : tile], 0);
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const u64 a = x + ((tile * TILE + k * 32) >> 4);
#if OUTPUT
      wgmma_64(sums, a, descriptor(weight + (2 * part + tile) * TILE, 16) + (k * 32 >> 4), 1);
#else
      wgmma_256(sums, a, descriptor(weight + tile * 4 * TILE, TILE) + (k * 16 * 128 >> 4));
#endif
    }
    wgmma_commit();
  }
  wgmma_wait<0>();
  if (threadIdx.x % 32 == 0) barrier_arrive(&shared.empty[stage]);
}

// A tile's columns with RoPE are as they were.
__device__ __forceinline__ void copy_rope(const u16* x, u16* out, int x_row, int heads, int first, int tokens) {
#pragma unroll
  for (int i = threadIdx.x; i < TOKENS * ROPE / 8; i += CONSUMERS) {
    const int token = first + i / (ROPE / 8), column = i % (ROPE / 8) * 8;
    if (token < tokens)
      *(uint4*)(out + (size_t)token * heads * WIDTH + LATENT + column) = *(const uint4*)(x + (size_t)token * x_row + NOPE + column);
  }
}

// x [tokens, .] with heads side by side, `x_columns` apart, and rows `x_row` apart; weight's heads are `weight_rows` apart.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
mla_absorb(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap weight, const u16* __restrict__ from,
           u16* __restrict__ out, int tokens, int heads, int x_columns, int x_row, int weight_rows) {
  extern __shared__ char memory[];
  Shared& shared = *(Shared*)(memory + (-shared_address(memory) & 1023));
  const Work work{(int)blockIdx.x / 2, (int)blockIdx.x % 2, tokens};
  if (threadIdx.x == 0) {
    for (int part = 0; part < PARTS; ++part) barrier_init(&shared.weight_full[part], 1);
    for (int i = 0; i < STAGES; ++i) barrier_init(&shared.full[i], 1), barrier_init(&shared.empty[i], CONSUMERS / 32);
    publish();
    load_weight(shared, &weight, work.head * weight_rows, work.half);
  }
  __syncthreads();
  wait_for_inputs();
  if (threadIdx.x >= CONSUMERS) {
    if (threadIdx.x == CONSUMERS) produce(shared, &x, work.head * x_columns, work);
    return;
  }
  const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
  out += (size_t)work.head * WIDTH;
  for (int tile = 0, piece = 0; tile < work.tiles(); ++tile) {
    float sums[SUMS] = {};
    if (!OUTPUT && work.half == 0) copy_rope(from + (size_t)work.head * x_columns, out, x_row, heads, tile * TOKENS, tokens);
    for (int part = 0; part < PIECES; ++part, ++piece) {
      barrier_wait(&shared.full[piece % STAGES], piece / STAGES & 1);
      multiply(shared, sums, piece % STAGES, part);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = tile * TOKENS + row + 8 * half;
      store_row(sums, half, 1.f, out + (size_t)token * heads * WIDTH + work.half * COLUMNS, token < tokens);
    }
  }
}
