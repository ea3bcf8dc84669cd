// Causal attention with head dimensions 192 (queries, keys) and 128 (values) on Hopper: 128 queries of a head a CTA.
//
// Two warpgroups hold 64 queries' sums each (64 registers a thread). Keys and values come in blocks of 128 tokens, from the last
// that is seen to the first, copied by a third warpgroup's one thread. Under the scores of a block run the products of the
// weights of the block before with its values, and warpgroups issue both in turns, so that one's softmax runs under the
// other's products:
//
//     0:  scores 1, adds 0 | weights 1               | scores 2, adds 1 | weights 2
//     1:                   | scores 1, adds 0        | weights 1        | scores 2, adds 1
//
// CTAs stay for several pieces of work; the third warpgroup takes the next one in time, whose loads and first scores run while
// sums are written. Rows behind the last key that any query of a piece sees may hold anything; what is NaN or infinite in a value
// before it spoils all queries of the piece that meet its block.
// The compiler would move a block's softmax behind the wait for the products that it is to run under, were there not a branch
// between them that nobody takes (`next_block`). Of long prompts the chip's power is the limit.
// Compiled by NVRTC for sm_90a: L2_BYTES, that keys and values in use at a time may take.

#include "../numerics.cuh"
#include "../wgmma.cuh"
#include "../softmax.cuh"
#include "work.cuh"

constexpr int CONSUMER_REGISTERS = 232, PRODUCER_REGISTERS = 40;  // of the 3 * 168 that CTAs begin with

enum Barrier { TURN = 1, CLEARED = 3 };  // of bar.sync; + w: warpgroup w's own

struct Shared {
  char q[Q_TILES * TILE], keys[STAGES][Q_TILES * TILE], values[STAGES][V_TILES * TILE];
  u64 q_full, q_empty, keys_full[STAGES], keys_empty[STAGES], values_full[STAGES], values_empty[STAGES];
  u64 next_full[STAGES], next_empty[STAGES];
  int next[STAGES];  // piece
  u64 never;
};

// One thread: waits until the last reader of a place is done, and announces that so many bytes will come.
__device__ __forceinline__ u64* awaited(u64 (&full)[STAGES], u64 (&empty)[STAGES], const Slot& slot, u32 bytes) {
  barrier_wait(&empty[slot.stage], slot.parity ^ 1);
  barrier_expect(&full[slot.stage], bytes);
  return &full[slot.stage];
}

__device__ __forceinline__ void load_keys(Shared& shared, const TensorMap* key, const TensorMap* rope, const Columns& at,
                                          const Piece& piece, int row, const Slot& slot) {
  const u32 keys = shared_address(shared.keys[slot.stage]);
  u64* done = awaited(shared.keys_full, shared.keys_empty, slot, Q_TILES * TILE);
  copy_tile(keys, key, piece.head * at.key, row, done);
  copy_tile(keys + TILE, key, piece.head * at.key + 64, row, done);
  copy_tile(keys + 2 * TILE, rope, piece.head * at.rope, row, done);
}

__device__ __forceinline__ void load_values(Shared& shared, const TensorMap* value, const Columns& at, const Piece& piece, int row,
                                            const Slot& slot) {
  const u32 values = shared_address(shared.values[slot.stage]);
  u64* done = awaited(shared.values_full, shared.values_empty, slot, V_TILES * TILE);
  copy_tile(values, value, piece.head * at.value, row, done);
  copy_tile(values + TILE, value, piece.head * at.value + 64, row, done);
}

__device__ __forceinline__ void produce(Shared& shared, const TensorMap* q, const TensorMap* key, const TensorMap* rope,
                                        const TensorMap* value, const Columns& at, const Problem& p) {
  Slot slot{0, 0}, turn{0, 0};
  Piece piece;
  Walk walk;
  u32 q_parity = 1;
#pragma unroll 1
  for (int index = blockIdx.x, next; walk.find(p, index, piece); index = next, turn.next()) {
    next = gridDim.x + (p.taken ? atomicAdd(p.taken, 1) : index);
#pragma unroll 1
    for (int block = piece.blocks - 1; block >= 0; --block, slot.next()) {
      const int row = piece.k_row + block * KEYS;
      load_keys(shared, key, rope, at, piece, row, slot);
      if (block == piece.blocks - 1) {
        barrier_wait(&shared.q_empty, q_parity);
        barrier_expect(&shared.q_full, Q_TILES * TILE);
#pragma unroll
        for (int tile = 0; tile < Q_TILES; ++tile)
          copy_tile(shared_address(shared.q) + tile * TILE, q, piece.head * at.q + 64 * tile, piece.q_row, &shared.q_full);
        q_parity ^= 1;
      }
      load_values(shared, value, at, piece, row, slot);
    }
    barrier_wait(&shared.next_empty[turn.stage], turn.parity ^ 1);
    shared.next[turn.stage] = next;
    barrier_arrive(&shared.next_full[turn.stage]);
  }
}

__device__ __forceinline__ void done_with(u64* barrier) {
  if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}

// The piece after this one, all threads of a warpgroup.
__device__ __forceinline__ int take(Shared& shared, Slot& turn) {
  barrier_wait(&shared.next_full[turn.stage], turn.parity);
  const int next = *(volatile int*)&shared.next[turn.stage];
  __syncwarp();
  done_with(&shared.next_empty[turn.stage]);
  turn.next();
  return next;
}

// Issues the scores of a block's keys.
__device__ __forceinline__ void score(Shared& shared, int w, float (&s)[64], u32 stage) {
  const u64 q = descriptor(shared_address(shared.q) + w * 64 * 128, 16);
  const u64 keys = descriptor(shared_address(shared.keys[stage]), 16);
  wgmma_begin();
#pragma unroll
  for (int tile = 0; tile < Q_TILES; ++tile)
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const u32 step = (tile * TILE + k * 32) >> 4;
      wgmma_128(s, q + step, keys + step, tile + k > 0);
    }
  wgmma_commit();
}

// Issues the products of weights with a block's values.
__device__ __forceinline__ void add(Shared& shared, float (&o)[64], const u32 (&weights)[8][4], u32 stage) {
  const u64 values = descriptor(shared_address(shared.values[stage]), TILE);
  wgmma_begin();
#pragma unroll
  for (int k = 0; k < 8; ++k) wgmma_128(o, weights[k], values + (k * 16 * 128 >> 4));
  wgmma_commit();
}

// Nothing where a key is later than the query: this thread's rows see the first `first` and first + 8 of the block's keys.
__device__ __forceinline__ void mask(float (&s)[64], int first) {
  const int column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < 64; ++i)
    if (i / 4 * 8 + column + i % 2 >= first + i / 2 % 2 * 8) s[i] = __uint_as_float(0xFF800000u);  // -inf
}

// Values that no query sees become zeros, which weights of zero may meet.
__device__ __forceinline__ void clear(Shared& shared, int w, u32 stage, int seen) {
  for (int i = seen * 8 + threadIdx.x % 128; i < KEYS * 8; i += 128)
#pragma unroll
    for (int tile = 0; tile < V_TILES; ++tile) *(uint4*)(shared.values[stage] + tile * TILE + i * 16) = make_uint4(0, 0, 0, 0);
  publish();
  rendezvous(CLEARED + w, 128);
}

// Sums over their rows' totals.
__device__ __forceinline__ void write(const float (&o)[64], const float (&sum)[2], const float (&top)[2], int row, const Problem& p,
                                      const Piece& piece) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int line = row + 8 * half;
    float all = sum[half] + __shfl_xor_sync(~0u, sum[half], 1);
    all += __shfl_xor_sync(~0u, all, 2);
    const float factor = all == 0.f ? 0.f : 1.f / all;
    const size_t place = (size_t)(piece.q_row + line) * p.heads + piece.head;
    if (threadIdx.x % 4 == 0 && line < piece.rows)
      p.lse[(size_t)piece.head * p.rows + piece.q_row + line] = natural(top[half], p.scale, all);
    store_row(o, half, factor, p.out + place * VALUES, line < piece.rows);
  }
}

// Scores of a block -> weights and their sums; `factor` is for what was added before.
__device__ __forceinline__ void soften(float (&s)[64], float (&top)[2], float (&sum)[2], float (&factor)[2], float scale) {
  const float before[2] = {top[0], top[1]};
  largest(s, top);
  settle(top, before, scale);
  factors(factor, before, top, scale);
  sum[0] *= factor[0], sum[1] *= factor[1];
  weigh(s, top, scale, sum);
}

// What a warpgroup is at: the place of its next block, piece and queries.
struct State {
  Slot slot, turn;
  u32 q_parity;
  Walk walk;
};

// Finds the first piece from `index` on that sees a key, and waits until its queries and last keys are there; others are zeros.
__device__ __forceinline__ bool find(Shared& shared, const Problem& p, State& at, int index, int row, Piece& piece) {
#pragma unroll 1
  while (at.walk.find(p, index, piece)) {
    if (piece.blocks > 0) {
      barrier_wait(&shared.q_full, at.q_parity);
      at.q_parity ^= 1;
      barrier_wait(&shared.keys_full[at.slot.stage], at.slot.parity);
      return true;
    }
    const float nothing[64] = {}, none[2] = {};
    write(nothing, none, none, row, p, piece);
    index = take(shared, at.turn);
  }
  return false;
}

// The first block of a piece, whose scores are issued: weights of it, and no sums yet.
__device__ __forceinline__ void first_block(Shared& shared, int w, const Problem& p, const Piece& piece, int row, const Slot& slot,
                                            float (&s)[64], u32 (&weights)[8][4], float (&top)[2], float (&sum)[2]) {
  const int block = piece.blocks - 1, seen = piece.seen - block * KEYS;
  float factor[2];
  wgmma_wait<0>();
  done_with(&shared.keys_empty[slot.stage]);
  mask(s, piece.offset + 1 + row - block * KEYS);
  soften(s, top, sum, factor, p.scale);
  round_weights(s, weights);
  if (seen < KEYS) {
    barrier_wait(&shared.values_full[slot.stage], slot.parity);
    clear(shared, w, slot.stage, seen);
  }
}

// One more block: its scores, and under them the products of the weights of the block before.
__device__ __forceinline__ void next_block(Shared& shared, int w, const Problem& p, int first, int row, Slot& slot, float (&s)[64],
                                           u32 (&weights)[8][4], float (&o)[64], float (&top)[2], float (&sum)[2]) {
  const Slot before = slot;
  float factor[2];
  slot.next();
  barrier_wait(&shared.keys_full[slot.stage], slot.parity);
  rendezvous(TURN + w, CONSUMERS);
  score(shared, w, s, slot.stage);
  barrier_wait(&shared.values_full[before.stage], before.parity);
  add(shared, o, weights, before.stage);
  announce(TURN + 1 - w, CONSUMERS);
  wgmma_wait<1>();
  done_with(&shared.keys_empty[slot.stage]);
  if (first + w * 64 < KEYS) mask(s, first + row);
  soften(s, top, sum, factor, p.scale);
  if (sum[0] + sum[1] < 0.f) barrier_arrive(&shared.never);  // or the compiler waits before the exponentials
  wgmma_wait<0>();
  done_with(&shared.values_empty[before.stage]);
  rescale(o, factor);
  round_weights(s, weights);
}

__device__ __forceinline__ void consume(Shared& shared, int w, const Problem& p) {
  const int row = w * 64 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  State at{};
  Piece piece;
  float s[64];
  if (w == 1) announce(TURN, CONSUMERS);
  bool more = find(shared, p, at, blockIdx.x, row, piece);
  score(shared, w, s, at.slot.stage);
#pragma unroll 1
  while (more) {
    const Piece now = piece;
    float top[2] = {NONE, NONE}, sum[2] = {};
    u32 weights[8][4];
    first_block(shared, w, p, now, row, at.slot, s, weights, top, sum);
    float o[64] = {};
#pragma unroll 1
    for (int block = now.blocks - 2; block >= 0; --block)
      next_block(shared, w, p, now.offset + 1 - block * KEYS, row, at.slot, s, weights, o, top, sum);
    done_with(&shared.q_empty);
    const u32 last = at.slot.stage;
    barrier_wait(&shared.values_full[last], at.slot.parity);
    add(shared, o, weights, last);
    at.slot.next();
    more = find(shared, p, at, take(shared, at.turn), row, piece);
    score(shared, w, s, at.slot.stage);  // of the next piece, or of nothing
    wgmma_wait<1>();
    done_with(&shared.values_empty[last]);
    write(o, sum, top, row, p, now);
  }
  wgmma_wait<0>();
}

// q [rows, .], keys, ropes and values [rows of keys, .], heads side by side; cu_q, cu_k [sequences + 1]. Any number of CTAs.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
mla_prefill(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap key, const __grid_constant__ TensorMap rope,
            const __grid_constant__ TensorMap value, const int* __restrict__ cu_q, const int* __restrict__ cu_k,
            u16* __restrict__ out, float* __restrict__ lse, int* __restrict__ taken, int sequences, int heads, int rows,
            int q_columns, int key_columns, int rope_columns, int value_columns, float scale) {
  extern __shared__ char memory[];
  Shared& shared = *(Shared*)(memory + (-shared_address(memory) & 1023));
  if (threadIdx.x == 0) {
    barrier_init(&shared.q_full, 1), barrier_init(&shared.q_empty, CONSUMERS / 32);
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(&shared.keys_full[i], 1), barrier_init(&shared.keys_empty[i], CONSUMERS / 32);
      barrier_init(&shared.values_full[i], 1), barrier_init(&shared.values_empty[i], CONSUMERS / 32);
      barrier_init(&shared.next_full[i], 1), barrier_init(&shared.next_empty[i], CONSUMERS / 32);
    }
    publish();
  }
  __syncthreads();
  wait_for_inputs();
  const Problem problem{cu_q, cu_k, out, lse, taken, sequences, heads, rows, scale};
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (group == 2) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(PRODUCER_REGISTERS));
    const Columns at{q_columns, key_columns, rope_columns, value_columns};
    if (threadIdx.x == CONSUMERS) produce(shared, &q, &key, &rope, &value, at, problem);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(CONSUMER_REGISTERS));
    consume(shared, group, problem);
  }
}
