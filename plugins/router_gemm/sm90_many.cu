// logits [tokens, EXPERTS] = x [tokens, HIDDEN] * weight [EXPERTS, HIDDEN]^T for 17 to 64 tokens, BF16 in, FP32 out, on Hopper's
// matrix instructions: tokens are their 64 rows, experts their columns. A cluster of SPLIT CTAs shares the experts of a group, each
// takes a part of HIDDEN and has all of it on its way at once, through TMA. Rows beyond the last token, which it fills with zeros,
// cost more than others: ROWS is the number of tokens, rounded up to 8. Instructions read 64 rows all the same, beyond ROWS whatever
// follows in shared memory, for sums that are not used.
//
// x is read by every cluster: fewer, of more experts, would read less, but too few multiprocessors then read. Clusters share the
// tiles of 8 experts, some one more than others: seven clusters of sixteen CTAs fit on an H200 at once, or fifteen of eight, and
// one that has to wait takes as long again.
//
// Sixteen CTAs are ahead up to 48 tokens, eight from 64 on: a CTA of sixteen has less to load, and is sent more.
//
// On an H200 (2026-11-30) it takes 2.8 us at 32 tokens and 3.2 at 64; the loads, the sum over the cluster and the writes, without a
// product, in the best of four layouts 2.4 and 3.1. Copies by cp.async, or through registers, into shared memory were slower, boxes
// of several tiles no faster, nor copies begun 0.3 us earlier, before the block's barrier.
//
// Compiled by NVRTC: HIDDEN, EXPERTS, ROWS, SPLIT, GROUPS, TILES (of a group at most, 4 or 5). Needs sm_90a.

#include "../numerics.cuh"
#include "../wgmma.cuh"
#include "../cluster.cuh"

constexpr int ALL = EXPERTS / 8, COLUMNS = 8 * TILES, OWN = HIDDEN / SPLIT, CHUNKS = OWN / 64;
constexpr int X_BYTES = ROWS * 128, W_BYTES = COLUMNS * 128, STAGE = X_BYTES + W_BYTES;
constexpr int SENDERS = (ROWS + 15) / 16 * 32;  // threads whose rows are used
constexpr int QUADS = SENDERS * TILES, SHARE = QUADS / SPLIT;  // four sums a thread and 8 columns

static_assert(CHUNKS * 64 * SPLIT == HIDDEN && ALL * 8 == EXPERTS && ROWS % 8 == 0, "the shape must split evenly");
static_assert(TILES * GROUPS >= ALL && SHARE * SPLIT == QUADS, "the shape must split evenly");

// sum [64, COLUMNS] = (or +=) a [64, 16] * b [COLUMNS, 16]^T, both in shared memory, rows along the inner axis
__device__ __forceinline__ void product(float (&s)[COLUMNS / 2], u64 a, u64 b, int add) {
#if TILES == 5
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %22, 0; wgmma.mma_async.sync.aligned.m64n40k16.f32.bf16.bf16 {" PLACES_16
      ",%16,%17,%18,%19}, %20, %21, p, 1, 1, 0, 0; }"
      : SUMS_16(s, 0), FOUR(s, 16) : "l"(a), "l"(b), "r"(add));
#else
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %18, 0; wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {" PLACES_16
      "}, %16, %17, p, 1, 1, 0, 0; }"
      : SUMS_16(s, 0) : "l"(a), "l"(b), "r"(add));
#endif
}

// A thread's four sums of 8 columns: two experts of a token, and of the token 8 further.
__device__ __forceinline__ void write(float* logits, int quad, float4 v, int first, int tiles, int tokens) {
  const int tile = quad / SENDERS, sender = quad % SENDERS, token = sender / 32 * 16 + sender % 32 / 4;
  float* to = logits + (size_t)token * EXPERTS + (first + tile) * 8 + sender % 4 * 2;
  if (tile < tiles && token < tokens) *(float2*)to = make_float2(v.x, v.y);
  if (tile < tiles && token + 8 < tokens) *(float2*)(to + 8 * EXPERTS) = make_float2(v.z, v.w);
}

extern "C" __global__ void __cluster_dims__(SPLIT, 1, 1) __launch_bounds__(128, 1)
router_gemm_many(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap weight, float* __restrict__ logits,
                 int tokens) {
  extern __shared__ char memory[];
  __shared__ float4 parts[SPLIT][SHARE];
  __shared__ u64 loaded[CHUNKS], summed;
  const u32 stages = (shared_address(memory) + 1023) / 1024 * 1024;
  const int rank = blockIdx.x % SPLIT, group = blockIdx.x / SPLIT;
  const int first = group * ALL / GROUPS, tiles = (group + 1) * ALL / GROUPS - first;
  if (threadIdx.x == 96) fetch(&x), fetch(&weight);
  if (threadIdx.x == 0) {
    for (int i = 0; i < CHUNKS; ++i) barrier_init(&loaded[i], 2);
    expect_from_cluster(&summed, sizeof(parts));
  }
  __syncthreads();
  cluster_arrive();
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
      barrier_expect(&loaded[i], W_BYTES);
      copy_tile(stages + i * STAGE + X_BYTES, &weight, rank * OWN + i * 64, first * 8, &loaded[i]);
    }
  }
  wait_for_inputs();
  if (threadIdx.x == 32) {
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
      barrier_expect(&loaded[i], X_BYTES);
      copy_tile(stages + i * STAGE, &x, rank * OWN + i * 64, 0, &loaded[i]);
    }
  }
  __syncwarp();
  float sum[COLUMNS / 2];
  wgmma_begin();
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
    barrier_wait(&loaded[i], 0);
#pragma unroll
    for (int k = 0; k < 4; ++k)
      product(sum, descriptor(stages + i * STAGE + k * 32, 16), descriptor(stages + i * STAGE + X_BYTES + k * 32, 16), i || k);
    wgmma_commit();
  }
  wgmma_wait<0>();
  cluster_wait();  // all CTAs have begun, so their shared memory is there
  if (SENDERS == 128 || threadIdx.x < SENDERS) {  // without a branch addresses are computed ahead
#pragma unroll
    for (int j = 0; j < TILES; ++j) {
      const int i = j * SENDERS + threadIdx.x;
      push(&parts[rank][i % SHARE], &summed, i / SHARE, make_float4(sum[4 * j], sum[4 * j + 1], sum[4 * j + 2], sum[4 * j + 3]));
    }
  }
  if (threadIdx.x >= SHARE) return;
  barrier_wait(&summed, 0);
  write(logits, rank * SHARE + threadIdx.x, sum_of(parts, threadIdx.x), first, tiles, tokens);
}
