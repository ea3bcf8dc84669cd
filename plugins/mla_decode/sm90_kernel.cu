// Weight-absorbed latent attention for decoding, on Hopper: 64 heads a CTA over a range of one sequence's cached latents.
//
// Keys are latent | rope (576), values the latent alone (512), so a block of 64 tokens, once in shared memory, serves both
// products. Two warpgroups take blocks in pairs: warpgroup w finds the scores and weights of block w, and adds the columns
// 256 w .. 256 w + 255 of both blocks' values: its sums are 128 registers a thread. They take turns, so that one's arithmetic
// runs under the other's products:
//
//     0:  scores 0 | weights 0, largest so far ->                    adds 0 | <- larger: rescale, weights 0 again -> | adds 1
//     1:  scores 1                 -> | weights 1, larger still ->                   adds 1                         -> | adds 0
//
// Weights go where the block's rope key was, which nobody needs after the scores. A producer warp copies blocks with the copy
// engine; each half of a block is free, and loaded anew, as soon as its last reader is done. CTAs stay for several pieces of work:
// loads for the next begin while sums are written.
//
// The cache's rows beyond a sequence may hold anything: masked scores are lowest, and rows are zeroed before they are weighed.
// An FP8 cache (E4M3) is read by the four warps that are idle otherwise, through registers, and expanded to FP16, exactly; queries
// and weights are FP16 then, too, and the cache's scale is the scores' and the sums'. Two warps a block, so that none waits for the
// other's loads: the compiler waits for all that a warp has asked for.
// Compiled by NVRTC for sm_90a: HEADS (a multiple of 64, or fewer than 64), PAGE (a multiple of 64), FP8.

#include "../numerics.cuh"
#if FP8
#define OPERANDS "f16.f16"
#endif
#include "../wgmma.cuh"
#include "../softmax.cuh"
#include "work.cuh"
#include "expand.cuh"

constexpr int TILES = DIM / 64, ROPE_TILE = TILES - 1, BLOCK = TILES * TILE, CONSUMERS = 256, THREADS = CONSUMERS + 128;
constexpr int CONSUMER_REGISTERS = FP8 ? 200 : 240, PRODUCER_REGISTERS = FP8 ? 104 : 24;  // of the 3 * 168 that CTAs begin with

static_assert(2 * CONSUMER_REGISTERS + PRODUCER_REGISTERS <= 3 * 168, "more registers than the CTA has would never come");

// Of bar.sync. The first three: one warpgroup stores and arrives, the other waits and loads, which is the PTX manual's example of
// bar.arrive (racecheck reports the loads of `tops`). SUMS: both wait, each at its own place in the code (synccheck reports that).
enum Barrier { LARGEST_0 = 1, WEIGHTS_1, WEIGHTS_0, SUMS, CLEARED };  // CLEARED + w: one's own

struct Shared {
  char q[BLOCK], keys[2][BLOCK];
  float tops[2][64], sums[2][64], scale;
  u64 q_full, q_empty, never, full[2][2], empty[2][2];  // of block 0 or 1, columns below 256 or from there on
};

// Which half of a block its rope tile is loaded and freed with: the half that the other warpgroup frees last.
__device__ __forceinline__ constexpr int rope_half(int block) { return 1 - block; }

// One thread: 64 columns a copy, when their last reader is done.
__device__ __forceinline__ void load_half(Shared& shared, const TensorMap* cache, int block, int half, int row, u32 parity) {
  const bool rope = half == rope_half(block);
  const u32 tiles = shared_address(shared.keys[block]);
  u64* done = &shared.full[block][half];
  barrier_wait(&shared.empty[block][half], parity);
  barrier_expect(done, (4 + rope) * TILE);
#pragma unroll
  for (int i = 4 * half; i < 4 * half + 4; ++i) copy_tile(tiles + i * TILE, cache, i * 64, row, done);
  if (rope) copy_tile(tiles + ROPE_TILE * TILE, cache, ROPE_TILE * 64, row, done);
}

// Two warps: a half's codes, in registers, to FP16 where its last reader is done.
__device__ __forceinline__ void expand_half(Shared& shared, const Place& at, const Codes& codes, int block, int half, bool rope,
                                            u32 parity) {
  barrier_wait(&shared.empty[block][half], parity);
#pragma unroll
  for (int i = 0; i < 16; ++i) store_expanded(at, (4 * half + i / 4) * TILE + i % 4 * TILE / 4, codes.latent[i]);
  if (rope) {
#pragma unroll
    for (int i = 0; i < 4; ++i) store_expanded(at, ROPE_TILE * TILE + i * TILE / 4, codes.rope[i]);
  }
  publish();
  barrier_arrive(&shared.full[block][half]);
}

// A piece's blocks in pairs, each half when it is free. The last pair may lack its second block, then the first is loaded again
// (and masked).
__device__ __forceinline__ void load_blocks(Shared& shared, const TensorMap* cache, const int* pages, const Piece& piece,
                                            u32& parity) {
#pragma unroll 1
  for (int first = piece.begin; first < piece.end; first += 2, parity ^= 1) {
    const int row0 = cache_row(pages, first), row1 = cache_row(pages, min(first + 1, piece.end - 1));
    load_half(shared, cache, 0, 0, row0, parity), load_half(shared, cache, 1, 1, row1, parity);
    load_half(shared, cache, 0, 1, row0, parity), load_half(shared, cache, 1, 0, row1, parity);
  }
}

// The same of an FP8 cache: two warps a block of the pair, the codes of whose next half are on their way while they wait.
__device__ __forceinline__ void expand_blocks(Shared& shared, const char* cache, const int* pages, const Piece& piece,
                                              u32& parity) {
  const int block = __shfl_sync(~0u, threadIdx.x % 128 / 64, 0), last = piece.end - 1;
  const Place at(shared_address(shared.keys[block]));
  const char* from = cache + (size_t)cache_row(pages, min(piece.begin + block, last)) * DIM + at.column;
  Codes codes;
  fetch(codes, from, block);
#pragma unroll 1
  for (int first = piece.begin; first < piece.end; first += 2, parity ^= 1) {
    const int next = cache_row(pages, min(first + 2 + block, last));
    if (threadIdx.x % 64 == 0 && first + 2 <= last) prefetch(cache, next);
    expand_half(shared, at, codes, block, block, false, parity);
    fetch(codes, from, 1 - block), fetch_rope(codes, from);
    from = cache + (size_t)next * DIM + at.column;
    expand_half(shared, at, codes, block, 1 - block, true, parity);
    fetch(codes, from, block);
  }
}

// Of each piece the queries, then its blocks.
__device__ __forceinline__ void produce(Shared& shared, const TensorMap* q, const TensorMap* cache, const char* rows,
                                        const Problem& p) {
  u32 parity = 1, q_parity = 1;
#pragma unroll 1
  for (int index = blockIdx.x; index < p.pieces(); index += gridDim.x) {
    const Piece piece(p, index);
    if (piece.begin >= piece.end) continue;
    const int* pages = p.pages + (size_t)piece.sequence * p.most_pages;
    if (threadIdx.x == CONSUMERS) {
      barrier_wait(&shared.q_empty, q_parity);
      barrier_expect(&shared.q_full, BLOCK);
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile)
        copy_tile(shared_address(shared.q) + tile * TILE, q, tile * 64, piece.row, &shared.q_full);
    }
    q_parity ^= 1;
    if (FP8) expand_blocks(shared, rows, pages, piece, parity);
    else load_blocks(shared, cache, pages, piece, parity);
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

// Lowest where there is no token; rows of the block that are none become zeros, which a weight of zero may meet.
template <int W>
__device__ __forceinline__ void mask(Shared& shared, float (&s)[32], int seen) {
  const int column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < 32; ++i)
    if (i / 4 * 8 + column + i % 2 >= seen) s[i] = NONE;
  for (int i = threadIdx.x % 128; i < 8 * 64 * 8; i += 128)
    if (i / 8 % 64 >= seen) *(uint4*)(shared.keys[W] + i * 16) = make_uint4(0, 0, 0, 0);
  publish();
  rendezvous(CLEARED + W, 128);
}

// Weights into shared memory, for the other warpgroup.
__device__ __forceinline__ void share_weights(char* tile, int row, const u32 (&weights)[4][4]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int line = row + i % 2 * 8;
    *(u32*)(tile + line * 128 + ((i / 2 ^ line % 8) << 4) + threadIdx.x % 4 * 4) = weights[i / 4][i % 4];
  }
  publish();
}

__device__ __forceinline__ void free_half(Shared& shared, int block, int half) {
  if (threadIdx.x % 32 == 0) barrier_arrive(&shared.empty[block][half]);
}

// Adds the values of warpgroup W's columns of its own block, weights in registers, or of the other's, weights in shared memory.
template <int W>
__device__ __forceinline__ void add_own(Shared& shared, float (&o)[128], const u32 (&weights)[4][4]) {
  const u64 values = descriptor(shared_address(shared.keys[W]) + 4 * W * TILE, TILE);
  wgmma_begin();
#pragma unroll
  for (int k = 0; k < 4; ++k) wgmma_256(o, weights[k], values + (k * 16 * 128 >> 4));
  wgmma_commit();
}

template <int W>
__device__ __forceinline__ void add_other(Shared& shared, float (&o)[128]) {
  const u32 block = shared_address(shared.keys[1 - W]);
  const u64 values = descriptor(block + 4 * W * TILE, TILE), weights = descriptor(block + ROPE_TILE * TILE, 16);
  wgmma_begin();
#pragma unroll
  for (int k = 0; k < 4; ++k) wgmma_256(o, weights + (k * 32 >> 4), values + (k * 16 * 128 >> 4));
  wgmma_commit();
}

// One pair of blocks, as in the picture above.
__device__ __forceinline__ void pair_0(Shared& shared, int row, float scale, float (&s)[32], float (&top)[2], float (&o)[128],
                                       float (&sum)[2]) {
  float now[2] = {top[0], top[1]}, factor[2];
  u32 weights[4][4];
  largest(s, now);
  settle(now, top, scale);
  if (threadIdx.x % 4 == 0) shared.tops[0][row] = now[0], shared.tops[0][row + 8] = now[1];
  announce(LARGEST_0, CONSUMERS);
  scale = *(const volatile float*)&shared.scale;  // or the compiler announces after the exponentials
  factors(factor, top, now, scale);
  rescale(o, sum, factor);
  weigh(s, now, scale, sum);
  round_weights(s, weights);
  add_own<0>(shared, o, weights);
  if (sum[0] + sum[1] < 0.f) barrier_arrive(&shared.never);  // or the compiler adds them up before `add_other`
  rendezvous(WEIGHTS_1, CONSUMERS);
  top[0] = shared.tops[1][row], top[1] = shared.tops[1][row + 8];
  factors(factor, now, top, scale);
  if (__any_sync(~0u, factor[0] != 1.f || factor[1] != 1.f)) {
    u32 again[4][4];
#pragma unroll
    for (int i = 0; i < 16; ++i) again[i / 4][i % 4] = operand_times(weights[i / 4][i % 4], factor[i % 2]);
    share_weights(shared.keys[0] + ROPE_TILE * TILE, row, again);
  } else {
    share_weights(shared.keys[0] + ROPE_TILE * TILE, row, weights);
  }
  announce(WEIGHTS_0, CONSUMERS);
  wgmma_wait<0>();
  free_half(shared, 0, 0);
  rescale(o, sum, factor);
  add_other<0>(shared, o);
  wgmma_wait<0>();
  free_half(shared, 1, 0);
}

__device__ __forceinline__ void pair_1(Shared& shared, int row, float scale, float (&s)[32], float (&top)[2], float (&o)[128],
                                       float (&sum)[2]) {
  float now[2] = {NONE, NONE}, factor[2];
  u32 weights[4][4];
  largest(s, now);
  rendezvous(LARGEST_0, CONSUMERS);
  const float other[2] = {shared.tops[0][row], shared.tops[0][row + 8]};
  now[0] = fmaxf(now[0], other[0]), now[1] = fmaxf(now[1], other[1]);
  settle(now, other, scale);
  if (threadIdx.x % 4 == 0) shared.tops[1][row] = now[0], shared.tops[1][row + 8] = now[1];
  factors(factor, top, now, scale);
  rescale(o, sum, factor);
  weigh(s, now, scale, sum);
  round_weights(s, weights);
  share_weights(shared.keys[1] + ROPE_TILE * TILE, row, weights);
  announce(WEIGHTS_1, CONSUMERS);
  add_own<1>(shared, o, weights);
  rendezvous(WEIGHTS_0, CONSUMERS);
  add_other<1>(shared, o);
  wgmma_wait<1>();
  free_half(shared, 1, 1);
  wgmma_wait<0>();
  free_half(shared, 0, 1);
  top[0] = now[0], top[1] = now[1];
}

// Row sums of both warpgroups, then this one's columns.
__device__ __forceinline__ void write(Shared& shared, int w, int row, const float (&o)[128], float (&sum)[2], const float (&top)[2],
                                      const Problem& p, const Piece& piece) {
  const bool some = piece.begin < piece.end;  // or else both have nothing, and the other may still read the sums before
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    sum[half] += __shfl_xor_sync(~0u, sum[half], 1);
    sum[half] += __shfl_xor_sync(~0u, sum[half], 2);
    if (some && threadIdx.x % 4 == 0) shared.sums[w][row + 8 * half] = sum[half];
  }
  rendezvous(SUMS, CONSUMERS);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int line = row + 8 * half;
    if (line >= OWN_HEADS) continue;
    const float all = some ? sum[half] + shared.sums[1 - w][line] : 0.f, factor = all == 0.f ? 0.f : p.value_scale / all;
    const size_t place = (size_t)(piece.row + line) * p.splits + piece.split;
    if (w == 0 && threadIdx.x % 4 == 0) p.lse[place] = natural(top[half], p.scale, all);
    float* part = p.part + place * LATENT + 256 * w + threadIdx.x % 4 * 2;
    char* staged = shared.q + line * 1024 + threadIdx.x % 4 * 4;
#pragma unroll
    for (int j = 0; j < 32; ++j) {
      const float a = o[4 * j + 2 * half] * factor, b = o[4 * j + 2 * half + 1] * factor;
      if (p.splits > 1) *(float2*)(part + 8 * j) = make_float2(a, b);
      else if (some) *(u32*)(staged + ((32 * w + j ^ line % 8) << 4)) = bf16_pair(a, b);
      else *(u32*)(p.out + place * LATENT + 256 * w + threadIdx.x % 4 * 2 + 8 * j) = 0;  // the next queries may be there
    }
  }
  if (p.splits > 1 || !some) return;
  __syncwarp();  // whole rows of 16 bytes a lane, out of where the queries were; a warp reads what it wrote
  const int first = row / 16 * 16, lane = threadIdx.x % 32;
#pragma unroll 4
  for (int line = first; line < min(first + 16, OWN_HEADS); ++line)
    *(uint4*)(p.out + (size_t)(piece.row + line) * LATENT + 256 * w + 8 * lane) =
        *(const uint4*)(shared.q + line * 1024 + ((32 * w + (lane ^ line % 8)) << 4));
}

// Queries arrive in BF16.
__device__ __forceinline__ void queries_to_operands(Shared& shared) {
#pragma unroll 2
  for (int i = threadIdx.x; i < BLOCK / 16; i += CONSUMERS) {
    uint4& v = ((uint4*)shared.q)[i];
    v = make_uint4(to_operands(v.x), to_operands(v.y), to_operands(v.z), to_operands(v.w));
  }
  publish();
  rendezvous(SUMS, CONSUMERS);
}

template <int W>
__device__ __forceinline__ void consume(Shared& shared, const Problem& p) {
  const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  u32 parity = 0, q_parity = 0;
#pragma unroll 1
  for (int index = blockIdx.x; index < p.pieces(); index += gridDim.x) {
    const Piece piece(p, index);
    float o[128] = {}, top[2] = {NONE, NONE}, sum[2] = {};
    if (piece.begin < piece.end) {
      barrier_wait(&shared.q_full, q_parity);
      q_parity ^= 1;
      if (FP8) queries_to_operands(shared);
#pragma unroll 1
      for (int first = piece.begin; first < piece.end; first += 2, parity ^= 1) {
        float s[32];
        score<W>(shared, s, parity);
        const int seen = piece.limit - (first + W) * TOKENS;  // tokens of this block that are there
        if (seen < TOKENS) mask<W>(shared, s, seen);
        if (W == 0) pair_0(shared, row, p.scale, s, top, o, sum);
        else pair_1(shared, row, p.scale, s, top, o, sum);
      }
    }
    write(shared, W, row, o, sum, top, p, piece);
    publish();
    __syncwarp();
    if (piece.begin < piece.end && threadIdx.x % 32 == 0) barrier_arrive(&shared.q_empty);
  }
}

// q [rows of all sequences, DIM], cache [pages * PAGE, DIM], which begins at `rows`, pages [sequences, most_pages], lengths
// [sequences]; a sequence has `q_tokens` queries of HEADS rows, the last one at its last token. Any number of CTAs.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
mla_decode(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap cache, const char* __restrict__ rows,
           const int* __restrict__ pages, const int* __restrict__ lengths, u16* __restrict__ out, float* __restrict__ part,
           float* __restrict__ lse, int most_pages, int q_tokens, int splits, int sequences, float scale, float value_scale) {
  extern __shared__ char memory[];
  Shared& shared = *(Shared*)(memory + (-shared_address(memory) & 1023));
  if (threadIdx.x == 0) {
    shared.scale = scale;
    barrier_init(&shared.q_full, 1), barrier_init(&shared.q_empty, CONSUMERS / 32);
    for (int i = 0; i < 4; ++i) {
      barrier_init(&shared.full[i / 2][i % 2], FP8 ? 64 : 1), barrier_init(&shared.empty[i / 2][i % 2], 4);
    }
    publish();
  }
  __syncthreads();
  wait_for_inputs();
  const Problem problem{pages, lengths, out, part, lse, most_pages, q_tokens, splits, sequences, scale, value_scale};
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (group == 2) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(PRODUCER_REGISTERS));
    if (FP8 || threadIdx.x == CONSUMERS) produce(shared, &q, &cache, rows, problem);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(CONSUMER_REGISTERS));
    if (group == 0) consume<0>(shared, problem);
    else consume<1>(shared, problem);
  }
}
