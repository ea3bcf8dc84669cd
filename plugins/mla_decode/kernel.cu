// Weight-absorbed latent attention for decoding, on Hopper: 64 heads a CTA over a range of one sequence's cached latents.
//
// Keys are latent | rope (576), values the latent alone (512), so a block of 64 tokens, once in shared memory, serves both
// products. Two warpgroups take blocks in pairs: warpgroup w finds the scores of block w, both agree on each row's largest one,
// exchange their weights, and warpgroup w adds the values' columns 256 w .. 256 w + 255 of both blocks: its sums are 128
// registers a thread. Weights go where the block's rope key was, which nobody needs after the scores. A producer warp
// copies blocks with the copy engine. Each half of a block is free, and loaded anew, as soon as its last reader is done:
// warpgroup 0 takes block 0 first and 1 last, warpgroup 1 the other way round, so that loads overlap half of the products.
//
// The cache's rows beyond a sequence may hold anything: masked scores are -inf, and rows are zeroed before they are weighed.
// Compiled by NVRTC for sm_90a: HEADS (a multiple of 64, or fewer than 64), PAGE (a multiple of 64).

#include "../numerics.cuh"
#include "../wgmma.cuh"

constexpr int LATENT = 512, DIM = 576, TOKENS = 64, TILE = 64 * 128, TILES = DIM / 64, ROPE_TILE = TILES - 1;
constexpr int BLOCK = TILES * TILE, CONSUMERS = 256, THREADS = CONSUMERS + 128;
constexpr int OWN_HEADS = HEADS < 64 ? HEADS : 64;
constexpr float NONE = -1e30f;  // the largest score of nothing

struct Shared {
  char q[BLOCK], keys[2][BLOCK];
  float tops[2][64], sums[2][64];
  u64 q_full, full[2][2], empty[2][2];  // of block 0 or 1, columns below 256 or from there on
};

// Which half of a block its rope tile is loaded and freed with: the half that the other warpgroup frees last.
__device__ __forceinline__ constexpr int rope_half(int block) { return 1 - block; }

__device__ __forceinline__ void load_half(Shared& shared, const TensorMap* cache, int block, int half, int row, u32 parity) {
  const bool rope = half == rope_half(block);
  u64* full = &shared.full[block][half];
  barrier_wait(&shared.empty[block][half], parity);
  barrier_expect(full, (4 + rope) * TILE);
  const u32 tiles = shared_address(shared.keys[block]);
#pragma unroll
  for (int tile = 4 * half; tile < 4 * half + 4; ++tile) copy_tile(tiles + tile * TILE, cache, tile * 64, row, full);
  if (rope) copy_tile(tiles + ROPE_TILE * TILE, cache, ROPE_TILE * 64, row, full);
}

// One thread: the heads' queries, then blocks in pairs, each half when it is free. The last pair may lack its second block,
// then the first is loaded again (and masked).
__device__ __forceinline__ void produce(Shared& shared, const TensorMap* q, const TensorMap* cache, const int* pages, int q_row,
                                        int begin, int end) {
  barrier_expect(&shared.q_full, BLOCK);
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile)
    copy_tile(shared_address(shared.q) + tile * TILE, q, tile * 64, q_row, &shared.q_full);
  u32 parity = 1;
#pragma unroll 1
  for (int first = begin; first < end; first += 2, parity ^= 1) {
    constexpr int BLOCKS = PAGE / TOKENS;
    const int second = min(first + 1, end - 1);
    const int row0 = pages[first / BLOCKS] * PAGE + first % BLOCKS * TOKENS;
    const int row1 = pages[second / BLOCKS] * PAGE + second % BLOCKS * TOKENS;
    load_half(shared, cache, 0, 0, row0, parity);
    load_half(shared, cache, 1, 1, row1, parity);
    load_half(shared, cache, 0, 1, row0, parity);
    load_half(shared, cache, 1, 0, row1, parity);
  }
}

// The scores of this warpgroup's block: the half that is free first is there first.
template <int W>
__device__ __forceinline__ void score(Shared& shared, float (&s)[32], u32 parity) {
  const u64 q = descriptor(shared_address(shared.q), 16), keys = descriptor(shared_address(shared.keys[W]), 16);
  barrier_wait(&shared.full[W][W], parity);
  wgmma_begin();
#pragma unroll
  for (int i = 0; i < TILES; ++i) {
    const int tile = i < 4 ? 4 * W + i : i < 8 ? 4 * (1 - W) + i - 4 : ROPE_TILE;
    if (i == 4) {
      wgmma_commit();
      barrier_wait(&shared.full[W][1 - W], parity);
      wgmma_begin();
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const u32 step = (tile * TILE + k * 32) >> 4;
      wgmma_64(s, q + step, keys + step, i + k > 0);
    }
  }
  wgmma_commit();
  wgmma_wait<0>();
}

// The largest score of both blocks so far, for this thread's two rows.
__device__ __forceinline__ void agree(Shared& shared, int w, int row, const float (&s)[32], float (&top)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float own = NONE;
#pragma unroll
    for (int j = 0; j < 8; ++j) own = fmaxf(own, fmaxf(s[4 * j + 2 * half], s[4 * j + 2 * half + 1]));
    own = fmaxf(own, __shfl_xor_sync(~0u, own, 1));
    own = fmaxf(own, __shfl_xor_sync(~0u, own, 2));
    if (threadIdx.x % 4 == 0) shared.tops[w][row + 8 * half] = own;
    top[half] = fmaxf(top[half], own);
  }
  rendezvous(1, CONSUMERS);
#pragma unroll
  for (int half = 0; half < 2; ++half) top[half] = fmaxf(top[half], shared.tops[1 - w][row + 8 * half]);
}

// Scores -> weights in BF16: as the first operand of four steps, and in shared memory for the other warpgroup.
__device__ __forceinline__ void weigh(char* tile, int row, const float (&s)[32], const float (&top)[2], float scale, float (&sum)[2],
                                      u32 (&weights)[4][4]) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float offset = top[half] * scale;
      const float a = exp2_fast(s[4 * j + 2 * half] * scale - offset), b = exp2_fast(s[4 * j + 2 * half + 1] * scale - offset);
      sum[half] += a + b;
      const u32 pair = bf16_pair(a, b);
      weights[j / 2][j % 2 * 2 + half] = pair;
      const int line = row + 8 * half;
      *(u32*)(tile + line * 128 + ((j ^ line % 8) << 4) + threadIdx.x % 4 * 4) = pair;
    }
  }
}

// Rows of a block from `first` on are no tokens of this sequence: zeros there, that a weight of zero may meet.
__device__ __forceinline__ void clear(char* block, int first) {
  for (int i = threadIdx.x % 128; i < 8 * 64 * 8; i += 128)
    if (i / 8 % 64 >= first) *(uint4*)(block + i * 16) = make_uint4(0, 0, 0, 0);
}

// Adds both blocks' values, this warpgroup's columns, and frees what it was the last to read.
template <int W>
__device__ __forceinline__ void add_values(Shared& shared, float (&o)[128], const u32 (&weights)[4][4]) {
  const u32 columns = 4 * W * TILE;
  const u64 own = descriptor(shared_address(shared.keys[W]) + columns, TILE);
  const u64 other = descriptor(shared_address(shared.keys[1 - W]) + columns, TILE);
  const u64 their_weights = descriptor(shared_address(shared.keys[1 - W]) + ROPE_TILE * TILE, 16);
  wgmma_begin();
#pragma unroll
  for (int k = 0; k < 4; ++k) wgmma_256(o, weights[k], own + (k * 16 * 128 >> 4));
  wgmma_commit();
#pragma unroll
  for (int k = 0; k < 4; ++k) wgmma_256(o, their_weights + (k * 32 >> 4), other + (k * 16 * 128 >> 4));
  wgmma_commit();
  wgmma_wait<1>();
  if (threadIdx.x % 32 == 0) barrier_arrive(&shared.empty[W][W]);
  wgmma_wait<0>();
  if (threadIdx.x % 32 == 0) barrier_arrive(&shared.empty[1 - W][W]);
}

struct Output {
  u16* out;           // BF16 [rows, LATENT], or
  float *part, *lse;  // F32 [rows, splits, LATENT] and [rows, splits], in powers of two
  int row, splits, split;
};

// Row sums of both warpgroups, then this one's columns.
__device__ __forceinline__ void write(Shared& shared, int w, int row, float (&o)[128], float (&sum)[2], const float (&top)[2],
                                      float scale, const Output& to) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    sum[half] += __shfl_xor_sync(~0u, sum[half], 1);
    sum[half] += __shfl_xor_sync(~0u, sum[half], 2);
    if (threadIdx.x % 4 == 0) shared.sums[w][row + 8 * half] = sum[half];
  }
  rendezvous(1, CONSUMERS);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int line = row + 8 * half;
    if (line >= OWN_HEADS) continue;
    const float all = sum[half] + shared.sums[1 - w][line], factor = all > 0.f ? 1.f / all : 0.f;
    const size_t place = (size_t)(to.row + line) * to.splits + to.split;
    if (w == 0 && threadIdx.x % 4 == 0) to.lse[place] = all > 0.f ? top[half] * scale + log2f(all) : NONE;
    const size_t begin = place * LATENT + 256 * w + threadIdx.x % 4 * 2;
#pragma unroll
    for (int j = 0; j < 32; ++j) {
      const float a = o[4 * j + 2 * half] * factor, b = o[4 * j + 2 * half + 1] * factor;
      if (to.splits == 1) *(u32*)(to.out + begin + 8 * j) = bf16_pair(a, b);
      else *(float2*)(to.part + begin + 8 * j) = make_float2(a, b);
    }
  }
}

template <int W>
__device__ __forceinline__ void consume(Shared& shared, int begin, int end, int limit, float scale, const Output& to) {
  const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
  float o[128] = {}, top[2] = {NONE, NONE}, sum[2] = {};
  u32 parity = 0;
  if (begin < end) barrier_wait(&shared.q_full, 0);
#pragma unroll 1
  for (int first = begin; first < end; first += 2, parity ^= 1) {
    float s[32];
    score<W>(shared, s, parity);
    const int seen = limit - (first + W) * TOKENS;  // tokens of this block that are there
    if (seen < TOKENS) {
#pragma unroll
      for (int i = 0; i < 32; ++i)
        if (i / 4 * 8 + column + i % 2 >= seen) s[i] = NONE;
    }
    float before[2] = {top[0], top[1]};
    agree(shared, W, row, s, top);
    if (seen < TOKENS) clear(shared.keys[W], max(seen, 0));
    u32 weights[4][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      before[half] = exp2_fast((before[half] - top[half]) * scale);
      sum[half] *= before[half];
    }
    weigh(shared.keys[W] + ROPE_TILE * TILE, row, s, top, scale, sum, weights);
#pragma unroll
    for (int i = 0; i < 128; ++i) o[i] *= before[i / 2 % 2];
    publish();
    rendezvous(2, CONSUMERS);
    add_values<W>(shared, o, weights);
  }
  write(shared, W, row, o, sum, top, scale, to);
}

// q [rows of all sequences, DIM], cache [pages * PAGE, DIM], pages [sequences, most_pages], lengths [sequences]; a sequence has
// `q_tokens` queries of HEADS rows, the last one at its last token. Grid: (heads / 64 * q_tokens, splits, sequences).
extern "C" __global__ void __launch_bounds__(THREADS, 1)
mla_decode(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap cache, const int* __restrict__ pages,
           const int* __restrict__ lengths, u16* __restrict__ out, float* __restrict__ part, float* __restrict__ lse,
           int most_pages, int q_tokens, float scale) {
  extern __shared__ char memory[];
  Shared& shared = *(Shared*)(memory + (-shared_address(memory) & 1023));
  if (threadIdx.x == 0) {
    barrier_init(&shared.q_full, 1);
    for (int i = 0; i < 4; ++i) barrier_init(&shared.full[i / 2][i % 2], 1), barrier_init(&shared.empty[i / 2][i % 2], 4);
    publish();
  }
  __syncthreads();
  wait_for_inputs();
  const int q_row = (blockIdx.z * q_tokens * HEADS) + blockIdx.x * OWN_HEADS;
  const int length = lengths[blockIdx.z] - (q_tokens - 1 - (int)blockIdx.x * OWN_HEADS / HEADS);
  const int blocks = max(length + TOKENS - 1, 0) / TOKENS, pairs = (blocks + 1) / 2, share = (pairs + gridDim.y - 1) / gridDim.y;
  const int begin = blockIdx.y * share * 2, end = min(begin + share * 2, blocks), limit = min(length, end * TOKENS);
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (group == 2) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x == CONSUMERS && begin < end)
      produce(shared, &q, &cache, pages + (size_t)blockIdx.z * most_pages, q_row, begin, end);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    const Output to{out, part, lse, q_row, (int)gridDim.y, (int)blockIdx.y};
    if (group == 0) consume<0>(shared, begin, end, limit, scale, to);
    else consume<1>(shared, begin, end, limit, scale, to);
  }
}
