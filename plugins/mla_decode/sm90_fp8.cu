// Weight-absorbed latent attention for decoding over an FP8 cache, multiplied in FP8, on Hopper: 64 heads a CTA over a range of
// one sequence's cached latents. Queries are rounded to E4M3 by a power of two for each head, softmax weights after they were
// raised.
//
// Keys are latent | rope (576), values the latent alone (512). FP8 products want both operands along the sum: scores have that,
// values do not, since they are summed over tokens. So the second product is turned over, sums [latents, heads] = values^T
// weights^T: what has to be transposed is then its first operand, which may come from registers, and ldmatrix transposes on its
// way there: two bytes at a time, so that a lane has two latents of two tokens, and byte permutations part them. Tokens take the
// places in a sum that fall out of this, alike in the weights; no block is written to shared memory twice.
//
// Warpgroup 0 finds scores and weights of two blocks at once. Warpgroups 1 and 2 add the values of latents 0 .. 255 and 256 ..
// 511: 128 sums a thread, and 32 of a pair. A warp of the fourth copies blocks with the copy engine, STAGES ahead. CTAs stay for
// several pieces of work.
//
// Shared memory is what limits: of two blocks 72 KB are written, 108 read for scores, 64 to be turned over and 64 of weights (once
// for each 64 latents), 2,500 clocks at 128 bytes, where the products are 2,200. Scores of two blocks in one instruction read the
// queries half as often as of one. The next scores under this softmax, in other registers of the same warpgroup, gained nothing:
// its instructions wait their turn before the softmax's.
//
// FP8 products are added up in about 14 bits (DeepSeek-V3's report, 3.3.2), rounded towards zero: a sum of one sign over a whole
// piece lacks the more of it the longer it is (`peer_shortfall` of the benchmark is of a kernel that seems to sum so). So a pair of blocks
// is added up by FP8's adder, and what comes of it in float32, for 64 latents at a time.
//
// The cache's rows beyond a sequence may hold anything: masked scores are lowest, and rows are zeroed before they are weighed.
// Compiled by NVRTC for sm_90a: HEADS (a multiple of 64, or fewer than 64), PAGE (a multiple of 64).

#include "../numerics.cuh"
#include "../wgmma.cuh"
#include "../softmax.cuh"
#include "work.cuh"

constexpr int ROPE = 4 * TILE, BLOCK = ROPE + 64 * 64;  // bytes: four tiles of 128 columns, one of 64
constexpr int STAGES = 4, SLOTS = 2;                    // blocks of keys, of which two lie tile by tile; weights of two blocks
constexpr int SCORERS = 128, CONSUMERS = 3 * 128, THREADS = CONSUMERS + 128;
constexpr int SCORER_REGISTERS = 104, ADDER_REGISTERS = 192, PRODUCER_REGISTERS = 24;
constexpr u32 LEAST_POWER = 64;  // of BF16's exponents: NONE times the scale of a row of zeros must stay far below any score
constexpr float RAISED = 8.f, MOST = 0.75f;  // weights are 2^8.75 at most, of 448 that E4M3 has; the least code is 2^-9

static_assert(SCORER_REGISTERS + 2 * ADDER_REGISTERS + PRODUCER_REGISTERS <= 512, "more registers than the CTA has would never come");

// Of bar.sync.
enum Barrier { FREE = 1, QUERIES, TOTALS };

struct Shared {
  char q[BLOCK], keys[STAGES / 2][2 * BLOCK], weights[SLOTS][TILE];
  float factors[SLOTS][64], totals[64], scales[64];
  u32 larger[SLOTS][4];  // whether a warp of scorers has a factor other than 1
  u64 full[STAGES], empty[STAGES], weighed[SLOTS], added[SLOTS];
};

static_assert(sizeof(Shared) <= (1 + STAGES) * 64 * DIM + SLOTS * TILE + 2048, "fp8.py gives so much, and what alignment takes");

// The place in a ring of N, and the parity of its turn.
template <int N>
__device__ __forceinline__ u32 turn(u32 count) { return count / N & 1; }

// Rows of 64 bytes, 16-byte pieces swizzled by row / 2 % 4.
__device__ __forceinline__ u64 descriptor_64(u32 address) {
  return (u64)(address >> 4) | 1ull << 16 | (u64)(512 >> 4) << 32 | 2ull << 62;
}

__device__ __forceinline__ u32 place_64(int row, int piece) { return row * 64 + ((piece ^ row / 2 % 4) << 4); }

// sum [64, 128] = (or +=) a [64, 32] * b [128, 32]^T, E4M3, both in shared memory
__device__ __forceinline__ void wgmma_codes(float (&s)[64], u64 a, u64 b, int add) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %66, 0; wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" PLACES_64
      "}, %64, %65, p, 1, 1; }"
      : SUMS_64(s) : "l"(a), "l"(b), "r"(add));
}

// sum [64, 64] = (or +=) a [64, 32] * b [64, 32]^T, a in registers
template <bool ADD>
__device__ __forceinline__ void wgmma_codes(float (&s)[32], const u32 (&a)[4], u64 b) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {" PLACES_32
      "}, {%32,%33,%34,%35}, %36, p, 1, 1; }"
      : SUMS_32(s, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(ADD));
}

// 16 latents of 32 tokens, a row of shared memory a lane, as the first operand: latents 2 g and 2 g + 1 are its rows g and g + 8.
__device__ __forceinline__ void load_turned(u32 (&a)[4], u32 address) {
  u32 r[4];
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
  a[0] = __byte_perm(r[0], r[1], 0x6420), a[1] = __byte_perm(r[0], r[1], 0x7531);
  a[2] = __byte_perm(r[2], r[3], 0x6420), a[3] = __byte_perm(r[2], r[3], 0x7531);
}

__device__ __forceinline__ void store_shared(u32 to, u32 word) {
  asm volatile("st.shared.u32 [%0], %1;" :: "r"(to), "r"(word) : "memory");
}

// Where a block's first tile is in shared memory: the second of a pair is TILE further.
__device__ __forceinline__ u32 keys_of(Shared& shared, u32 count) {
  return shared_address(shared.keys[count / 2 % (STAGES / 2)]) + count % 2 * TILE;
}

// One thread: all blocks of all pieces. The last pair may lack its second block, then the first is loaded again (and masked).
__device__ __forceinline__ void produce(Shared& shared, const TensorMap* latents, const TensorMap* ropes, const Problem& p) {
  u32 count = 0;
#pragma unroll 1
  for (int index = blockIdx.x; index < p.pieces(); index += gridDim.x) {
    const Piece piece(p, index);
    const int *pages = p.pages + (size_t)piece.sequence * p.most_pages, last = piece.end - 1;
#pragma unroll 1
    for (int block = piece.begin; block < piece.end || count % 2; ++block, ++count) {
      const int row = cache_row(pages, min(block, last));
      u64* done = &shared.full[count % STAGES];
      const u32 to = keys_of(shared, count);
      barrier_wait(&shared.empty[count % STAGES], turn<STAGES>(count) ^ 1);
      barrier_expect(done, BLOCK);
#pragma unroll
      for (int tile = 0; tile < 4; ++tile) copy_tile(to + tile * 2 * TILE, latents, tile * 128, row, done);
      copy_tile(to + 2 * ROPE - count % 2 * TILE / 2, ropes, LATENT, row, done);
    }
  }
}

__device__ __forceinline__ float power_of_two(u32 biased) { return __uint_as_float(biased << 23); }

// Twelve warps: a piece's queries BF16 [OWN_HEADS, DIM] to E4M3, the largest of a row to between 2^7 and 2^8; an infinite one makes
// NaN of it. Rows of no head become zeros.
__device__ __forceinline__ void quantize_queries(Shared& shared, const u16* q) {
  constexpr int WARPS = CONSUMERS / 32, TURNS = (64 + WARPS - 1) / WARPS, PIECES = DIM / 8;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint4 v[TURNS][3];
#pragma unroll
  for (int i = 0; i < TURNS; ++i) {
    const int row = i * WARPS + warp;
#pragma unroll
    for (int j = 0; j < 3; ++j) {
      const int piece = j * 32 + lane;
      v[i][j] = row < OWN_HEADS && piece < PIECES ? load_input(q + (size_t)row * DIM + piece * 8) : make_uint4(0, 0, 0, 0);
    }
  }
#pragma unroll
  for (int i = 0; i < TURNS; ++i) {
    const int row = i * WARPS + warp;
    const u32 top = group_top<32>(max(max(top_of(v[i][0]), top_of(v[i][1])), top_of(v[i][2])));
    if (row >= 64) continue;
    const u32 power = max(top >> 7, LEAST_POWER);
    const float inverse = power == 255 ? 0.f : power_of_two(2 * 127 + 7 - power);
    if (lane == 0) shared.scales[row] = power_of_two(power - 7);
#pragma unroll
    for (int j = 0; j < 3; ++j) {
      const int column = (j * 32 + lane) * 8, within = column - LATENT;
      if (column >= DIM) continue;
      const u32 place = column < LATENT ? column / 128 * TILE + row * 128 + ((column % 128 / 16 ^ row % 8) << 4) + column % 16
                                        : ROPE + place_64(row, within / 16) + within % 16;
      *(uint2*)(shared.q + place) = e4m3_codes(v[i][j], inverse);
    }
  }
  publish();
}

// All consumers, before a piece: nobody reads the last one's queries and totals any more.
__device__ __forceinline__ void begin(Shared& shared, const u16* q, const Piece& piece) {
  rendezvous(FREE, CONSUMERS);
  quantize_queries(shared, q + (size_t)piece.row * DIM);
  rendezvous(QUERIES, CONSUMERS);
}

// Of a pair of blocks.
__device__ __forceinline__ void score(Shared& shared, float (&s)[64], u32 count) {
  const u32 q = shared_address(shared.q), keys = keys_of(shared, count);
  const u64 a = descriptor(q, 16), b = descriptor(keys, 16), rope_a = descriptor_64(q + ROPE), rope_b = descriptor_64(keys + 2 * ROPE);
  barrier_wait(&shared.full[count % STAGES], turn<STAGES>(count));
  barrier_wait(&shared.full[count % STAGES + 1], turn<STAGES>(count));
  wgmma_begin();
#pragma unroll
  for (int i = 0; i < 16; ++i) wgmma_codes(s, a + (i / 4 * TILE + i % 4 * 32 >> 4), b + (i / 4 * 2 * TILE + i % 4 * 32 >> 4), i > 0);
  wgmma_codes(s, rope_a, rope_b, 1), wgmma_codes(s, rope_a + 2, rope_b + 2, 1);
  wgmma_commit();
  wgmma_wait<0>();
}

// Lowest where there is no token; rows of the blocks that are none become zeros, which a weight of zero may meet.
__device__ __forceinline__ void mask(char* keys, float (&s)[64], int seen) {
  const int column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < 64; ++i)
    if (i / 4 * 8 + column + i % 2 >= seen) s[i] = NONE;
  for (int i = threadIdx.x; i < 2 * ROPE / 16; i += SCORERS)
    if (i / 8 % 128 >= seen) *(uint4*)(keys + i * 16) = make_uint4(0, 0, 0, 0);
}

struct Running {
  float top[2], sum[2], scale[2];
};

// Scores of a pair of blocks -> their weights in shared memory, for the adders.
__device__ __forceinline__ void soften(Shared& shared, float (&s)[64], Running& now, u32 count, int row) {
  const int lane = threadIdx.x % 32, slot = count / 2 % SLOTS;
  float top[2] = {now.top[0], now.top[1]}, factor[2];
  largest(s, top);
  settle(top, now.top, now.scale, MOST);
  factors(factor, now.top, top, now.scale);
  now.top[0] = top[0], now.top[1] = top[1], now.sum[0] *= factor[0], now.sum[1] *= factor[1];
  weigh(s, top, now.scale, now.sum, RAISED);
  const bool larger = __any_sync(~0u, factor[0] != 1.f || factor[1] != 1.f);
  barrier_wait(&shared.added[slot], turn<2 * SLOTS>(count) ^ 1);
  const u32 place = shared_address(shared.weights[slot]) + row * 128 + (row % 8 << 4) + lane % 4 * 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (lane % 4 == 0) shared.factors[slot][row + 8 * half] = factor[half];
#pragma unroll
    for (int piece = 0; piece < 8; ++piece) {
      const float* w = s + 8 * piece + 2 * half;
      store_shared((place ^ piece << 4) + half * 8 * 128, e4m3_pair(w[0], w[1]) | e4m3_pair(w[4], w[5]) << 16);
    }
  }
  if (lane == 0) shared.larger[slot][threadIdx.x / 32] = larger;
  publish();
  __syncwarp();
  if (lane) return;
  barrier_arrive(&shared.weighed[slot]);
  barrier_arrive(&shared.empty[count % STAGES]), barrier_arrive(&shared.empty[count % STAGES + 1]);
}

// Warpgroup 0.
__device__ __forceinline__ void score_pieces(Shared& shared, const u16* q, const Problem& p) {
  const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
  u32 count = 0;
#pragma unroll 1
  for (int index = blockIdx.x; index < p.pieces(); index += gridDim.x) {
    const Piece piece(p, index);
    Running now{{NONE, NONE}, {}, {}};
    if (piece.begin < piece.end) {
      begin(shared, q, piece);
      now.scale[0] = p.scale * shared.scales[row], now.scale[1] = p.scale * shared.scales[row + 8];
#pragma unroll 1
      for (int block = piece.begin; block < piece.end; block += 2, count += 2) {
        float s[64];
        score(shared, s, count);
        const int seen = piece.limit - block * TOKENS;
        if (seen < 2 * TOKENS) mask(shared.keys[count / 2 % (STAGES / 2)], s, seen);
        soften(shared, s, now, count, row);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = now.sum[half];
      sum += __shfl_xor_sync(~0u, sum, 1), sum += __shfl_xor_sync(~0u, sum, 2);
      const int line = row + 8 * half;
      if (threadIdx.x % 4 || line >= OWN_HEADS) continue;
      if (piece.begin < piece.end) shared.totals[line] = p.value_scale / sum;  // or the adders may still read the last piece's
      p.lse[(size_t)(piece.row + line) * p.splits + piece.split] = natural(now.top[half], now.scale[half], sum * exp2_fast(-RAISED));
    }
    if (piece.begin < piece.end) rendezvous(TOTALS, CONSUMERS);
  }
}

// Values of a pair of blocks, 16 latents, turned over; `place`: of this lane's row in the first block.
__device__ __forceinline__ void load_values(u32 (&values)[4][4], u32 place) {
#pragma unroll
  for (int k = 0; k < 4; ++k) load_turned(values[k], place + k / 2 * TILE + k % 2 * 32 * 128);
}

// What the sums so far are to be multiplied with: columns are heads.
__device__ __forceinline__ void rescale(float (&o)[4][32], const float* factors) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float2 factor = *(const float2*)(factors + 8 * j + threadIdx.x % 4 * 2);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      o[i][4 * j] *= factor.x, o[i][4 * j + 1] *= factor.y, o[i][4 * j + 2] *= factor.x, o[i][4 * j + 3] *= factor.y;
  }
}

// A pair of blocks. They are free when their last values are there: `never`, which is 0, keeps that from being said before.
__device__ __forceinline__ void add_pair(Shared& shared, float (&o)[4][32], u32 count, bool masked, u32 place, u32 never) {
  const int lane = threadIdx.x % 32, stage = count % STAGES, slot = count / 2 % SLOTS;
  const u32 keys = keys_of(shared, count) + place;
  const u64 weights = descriptor(shared_address(shared.weights[slot]), 16);
  u32 some = 0;
  barrier_wait(&shared.full[stage], turn<STAGES>(count));
  barrier_wait(&shared.full[stage + 1], turn<STAGES>(count));
  if (masked) barrier_wait(&shared.weighed[slot], turn<2 * SLOTS>(count));  // rows of no token are zeros by then
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    u32 values[4][4];
    float part[32];
    load_values(values, (keys ^ i % 2 * 64) + i / 2 * 2 * TILE);
    if (i == 0) {
      barrier_wait(&shared.weighed[slot], turn<2 * SLOTS>(count));
      const uint4 larger = *(const uint4*)shared.larger[slot];
      if ((larger.x | larger.y | larger.z | larger.w) != 0) rescale(o, shared.factors[slot]);
    }
#pragma unroll
    for (int k = 0; k < 16; ++k) asm volatile("" : "+r"(values[k / 4][k % 4]));  // or some are made after the fence
    if (i == 3)
#pragma unroll
      for (int k = 0; k < 16; ++k) some |= values[k / 4][k % 4];
    wgmma_begin();
    wgmma_codes<false>(part, values[0], weights);
#pragma unroll
    for (int k = 1; k < 4; ++k) wgmma_codes<true>(part, values[k], weights + 2 * k);
    wgmma_commit();
    if (i == 3) {
      __syncwarp();
      u64* free = &shared.empty[stage] + (some & never);
      if (lane == 0) barrier_arrive(free), barrier_arrive(free + 1);
    }
    wgmma_wait<0>();
#pragma unroll
    for (int k = 0; k < 32; ++k) asm volatile("" : "+f"(part[k]));  // or some may be added before they are there
#pragma unroll
    for (int k = 0; k < 32; ++k) o[i][k] += part[k];
  }
  __syncwarp();
  if (lane == 0) barrier_arrive(&shared.added[slot]);
}

// This warp's latents 16 * latents + 64 i .. + 15 of all heads.
__device__ __forceinline__ void write(Shared& shared, const float (&o)[4][32], int latents, const Problem& p, const Piece& piece) {
  const int column = latents * 16 + threadIdx.x % 32 / 4 * 2;
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    const int head = j / 2 * 8 + threadIdx.x % 4 * 2 + j % 2, element = j / 2 * 4 + j % 2;
    if (head >= OWN_HEADS) continue;
    const float factor = shared.totals[head];
    const size_t place = ((size_t)(piece.row + head) * p.splits + piece.split) * LATENT + column;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float a = o[i][element] * factor, b = o[i][element + 2] * factor;
      if (p.splits > 1) *(float2*)(p.part + place + 64 * i) = make_float2(a, b);
      else *(u32*)(p.out + place + 64 * i) = bf16_pair(a, b);
    }
  }
}

// A piece of no token.
__device__ __forceinline__ void write_nothing(const Problem& p, const Piece& piece) {
  uint4* out = (uint4*)(p.out + (size_t)piece.row * LATENT);
  for (int i = threadIdx.x - SCORERS; i < OWN_HEADS * LATENT / 8; i += CONSUMERS - SCORERS) out[i] = make_uint4(0, 0, 0, 0);
}

// Warpgroups 1 and 2.
__device__ __forceinline__ void add_pieces(Shared& shared, const u16* q, const Problem& p) {
  const int half = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const u32 place = half * 4 * TILE + lane * 128 + ((warp ^ lane % 8) << 4);
  u32 count = 0;
#pragma unroll 1
  for (int index = blockIdx.x; index < p.pieces(); index += gridDim.x) {
    const Piece piece(p, index);
    if (piece.begin >= piece.end) {
      if (p.splits == 1) write_nothing(p, piece);
      continue;
    }
    begin(shared, q, piece);
    float o[4][32] = {};
#pragma unroll 1
    for (int block = piece.begin; block < piece.end; block += 2, count += 2) {
      add_pair(shared, o, count, piece.limit - block * TOKENS < 2 * TOKENS, place, p.splits >> 31);
    }
    rendezvous(TOTALS, CONSUMERS);
    write(shared, o, half * 16 + warp, p, piece);
  }
}

// q BF16 [rows of all sequences, DIM], cache E4M3 [pages * PAGE, DIM] as tiles of 128 and of 64 columns, pages [sequences,
// most_pages], lengths [sequences]; a sequence has `q_tokens` queries of HEADS rows, the last one at its last token. Any number of CTAs.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
mla_decode_fp8(const __grid_constant__ TensorMap latents, const __grid_constant__ TensorMap ropes, const u16* __restrict__ q,
               const int* __restrict__ pages, const int* __restrict__ lengths, u16* __restrict__ out, float* __restrict__ part,
               float* __restrict__ lse, int most_pages, int q_tokens, int splits, int sequences, float scale, float value_scale) {
  extern __shared__ char memory[];
  Shared& shared = *(Shared*)(memory + (-shared_address(memory) & 1023));
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) barrier_init(&shared.full[i], 1), barrier_init(&shared.empty[i], CONSUMERS / 32);
    for (int i = 0; i < SLOTS; ++i)
      barrier_init(&shared.weighed[i], SCORERS / 32), barrier_init(&shared.added[i], (CONSUMERS - SCORERS) / 32);
    publish();
  }
  __syncthreads();
  wait_for_inputs();
  const Problem problem{pages, lengths, out, part, lse, most_pages, q_tokens, splits, sequences, scale, value_scale};
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (group == 3) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(PRODUCER_REGISTERS));
    if (threadIdx.x == CONSUMERS) produce(shared, &latents, &ropes, problem);
  } else if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(SCORER_REGISTERS));
    score_pieces(shared, q, problem);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(ADDER_REGISTERS));
    add_pieces(shared, q, problem);
  }
}
