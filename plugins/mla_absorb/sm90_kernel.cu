// A head's product of tokens with its weight, on Hopper, half of the weight's columns a CTA: 256 CTAs of R1's 128 heads are a wave.
//
//     x [T, heads, 128 + 64] -> [T, heads, 512 + 64]: x's first 128 columns times weight [heads, 128, 512] | its last 64
//
// The weight is loaded once, before the kernel in front has ended, and stays in shared memory; one warp's thread copies x in
// tiles of 64 tokens, four warps multiply. Compiled by NVRTC for sm_90a.

#include "../numerics.cuh"
#include "../wgmma.cuh"

constexpr int TOKENS = 64, TILE = 64 * 128, STAGES = 2, CONSUMERS = 128, THREADS = CONSUMERS + 32;
constexpr int NOPE = 128, ROPE = 64, LATENT = 512;
constexpr int COLUMNS = 256, WIDTH = LATENT + ROPE, SUMS = COLUMNS / 2;  // of a CTA, of all results, and of a thread
constexpr int PARTS = NOPE / 64;  // of the weight, by what of x they are multiplied with

struct Shared {
  char weight[8 * TILE], x[STAGES][2 * TILE];
  u64 weight_full[PARTS], full[STAGES], empty[STAGES];
};

struct Work {
  int head, half, tokens;
  __device__ __forceinline__ int tiles() const { return (tokens + TOKENS - 1) / TOKENS; }
};

// Tiles of 64 rows and columns: of 128 rows and 256 columns.
__device__ __forceinline__ void load_weight(Shared& shared, const TensorMap* weight, int row, int half) {
  constexpr int TILES = COLUMNS / 64;
#pragma unroll
  for (int part = 0; part < PARTS; ++part) {
    barrier_expect(&shared.weight_full[part], TILES * TILE);
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
      const u32 tile = shared_address(shared.weight) + (part * TILES + i) * TILE;
      copy_tile(tile, weight, half * COLUMNS + i * 64, row + part * 64, &shared.weight_full[part]);
    }
  }
}

__device__ __forceinline__ void produce(Shared& shared, const TensorMap* x, int column, const Work& work) {
  for (int tile = 0; tile < work.tiles(); ++tile) {
    const int stage = tile % STAGES;
    barrier_wait(&shared.empty[stage], (tile / STAGES + 1) & 1);
    barrier_expect(&shared.full[stage], 2 * TILE);
    copy_tile(shared_address(shared.x[stage]), x, column, tile * TOKENS, &shared.full[stage]);
    copy_tile(shared_address(shared.x[stage]) + TILE, x, column + 64, tile * TOKENS, &shared.full[stage]);
  }
}

// Adds the product of a tile of x with the weight.
__device__ __forceinline__ void multiply(Shared& shared, float (&sums)[SUMS], int stage) {
  const u64 x = descriptor(shared_address(shared.x[stage]), 16);
#pragma unroll
  for (int part = 0; part < PARTS; ++part) {
    const u64 weight = descriptor(shared_address(shared.weight) + part * COLUMNS / 64 * TILE, TILE);
    barrier_wait(&shared.weight_full[part], 0);
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma_256(sums, x + ((part * TILE + k * 32) >> 4), weight + (k * 16 * 128 >> 4));
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
  for (int tile = 0; tile < work.tiles(); ++tile) {
    float sums[SUMS] = {};
    if (work.half == 0) copy_rope(from + (size_t)work.head * x_columns, out, x_row, heads, tile * TOKENS, tokens);
    barrier_wait(&shared.full[tile % STAGES], tile / STAGES & 1);
    multiply(shared, sums, tile % STAGES);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = tile * TOKENS + row + 8 * half;
      store_row(sums, half, 1.f, out + (size_t)token * heads * WIDTH + work.half * COLUMNS, token < tokens);
    }
  }
}
