// logits [tokens, EXPERTS] = x [tokens, HIDDEN] * weight [EXPERTS, HIDDEN]^T, BF16 in, FP32 (or BF16) out, for up to 64 tokens.
//
// The time is that of a launch, of latencies, and of reading the weights once (3.7 MB for a router): a thread has all its loads on
// their way before it uses one. A cluster of SPLIT CTAs shares 16 * EXPERT_TILES experts: each CTA takes a share of HIDDEN, each
// warp a share of that. Weights are mma's A (16 experts), tokens its B (8 tokens). Fragments come straight from global memory, 16
// bytes a lane: the sum over HIDDEN may go in any order, so a lane's eight consecutive elements stand for the places that mma has
// for it in two steps, alike in A and B. Sums go up in a fixed order, warps through shared memory, CTAs through the cluster's,
// whose arrival a transaction barrier counts. The same result every time.
//
// One token is faster without tensor cores and clusters (router_gemm_one).
//
// Weights do not depend on the kernel before: with programmatic dependent launch they are loaded while it still runs. The choice of
// experts is a kernel of its own: with dependent launch both take 2.9 us at 1 token, 3.2 at 8, 3.4 at 16 on an H200; with the last
// CTA choosing, found by a counter, one kernel took 4.0, 5.3 and 6.9 there (2026-11-30; 20 in a graph, 0.3 more than by timing.py now).
//
// Of its 2.4 us there at 16 tokens an empty kernel is 0.6, and the loads, the sum over the cluster and the writes, without a product,
// take 2.1. A warp can have 14 loads of 16 bytes a lane on their way, then the next one waits; but each warp more is one more sum to
// add up. Clusters of sixteen with tokens as mma's rows took as long at 16 tokens and longer below; shared memory instead of registers
// and four other ways to sum were slower. From 17 tokens on sm90_many.cu is faster, on Hopper.
//
// Compiled by NVRTC for one shape: HIDDEN, EXPERTS, BF16_OUT and either THREADS or TOKEN_TILES (of 8), EXPERT_TILES, SPLIT,
// WARPS, DEPTH (chunks that a warp has on their way) and STREAMED. Needs sm_90.

#include "../numerics.cuh"
#include "../wgmma.cuh"
#include "../cluster.cuh"

typedef unsigned short bf16;

#if BF16_OUT
typedef bf16 Out;
__device__ __forceinline__ Out rounded(float value) { return (bf16)bf16_pair(value, 0.f); }
#else
typedef float Out;
__device__ __forceinline__ Out rounded(float value) { return value; }
#endif

// Weights: 128 bytes at a time from memory, of which neighbours want the rest. STREAMED ones leave the L2 first: a layer's other
// 30 MB take their place before they are read again.
__device__ __forceinline__ uint4 load_weights(const bf16* from) {
  uint4 v;
#if STREAMED
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("ld.global.L1::no_allocate.L2::cache_hint.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from), "l"(policy));
#else
  asm volatile("ld.global.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
#endif
  return v;
}

#ifdef THREADS

constexpr int TURNS = HIDDEN / (THREADS * 8);

static_assert(TURNS * THREADS * 8 == HIDDEN, "the shape must split evenly");

// Two BF16 in a word, the first in the lower half.
__device__ __forceinline__ float dot(u32 a, u32 b, float sum) {
  return fmaf(second_of(a), second_of(b), fmaf(first_of(a), first_of(b), sum));
}

// A CTA takes an expert. That two CTAs fit is said so that loads may have all the registers they want.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
router_gemm_one(const bf16* __restrict__ x, const bf16* __restrict__ weight, Out* __restrict__ logits) {
  __shared__ float sums[THREADS / 32];
  const int begin = threadIdx.x * 8;
  uint4 w[TURNS], v[TURNS];
#pragma unroll
  for (int i = 0; i < TURNS; ++i) w[i] = load_weights(weight + (size_t)blockIdx.x * HIDDEN + begin + i * THREADS * 8);
  wait_for_inputs();
#pragma unroll
  for (int i = 0; i < TURNS; ++i) v[i] = load_input(x + begin + i * THREADS * 8);
  float chains[2] = {};
#pragma unroll
  for (int i = 0; i < TURNS; ++i) {
    chains[0] = dot(w[i].y, v[i].y, dot(w[i].x, v[i].x, chains[0]));
    chains[1] = dot(w[i].w, v[i].w, dot(w[i].z, v[i].z, chains[1]));
  }
  float sum = chains[0] + chains[1];
#pragma unroll
  for (int distance = 16; distance; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x) return;
  float all = 0.f;
#pragma unroll
  for (int warp = 0; warp < THREADS / 32; ++warp) all += sums[warp];
  logits[blockIdx.x] = rounded(all);
}

#else

constexpr int CHUNK = 32;  // elements of HIDDEN that a warp takes at a time
constexpr int CHUNKS = HIDDEN / SPLIT / WARPS / CHUNK;
constexpr int TILES = EXPERT_TILES * TOKEN_TILES, QUADS = 32 * TILES, SHARE = QUADS / SPLIT;  // four sums a lane and tile
constexpr int CHAINS = TILES > 2 ? 1 : 2;  // of products that wait for each other

static_assert(CHUNKS * CHUNK * WARPS * SPLIT == HIDDEN && EXPERTS % (16 * EXPERT_TILES) == 0, "the shape must split evenly");
static_assert(DEPTH <= CHUNKS && SHARE * SPLIT == QUADS, "the shape must split evenly");

__device__ __forceinline__ void mma(float4& sum, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(sum.x), "+f"(sum.y), "+f"(sum.z), "+f"(sum.w)
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// A lane's four sums of a tile: an expert of 8, and 8 further, times two tokens.
__device__ __forceinline__ void write(Out* logits, int quad, float4 v, int first_expert, int tokens) {
  const int tile = quad / 32, row = quad % 32 / 4, token = tile % TOKEN_TILES * 8 + quad % 4 * 2;
  Out* to = logits + (size_t)token * EXPERTS + first_expert + tile / TOKEN_TILES * 16 + row;
  if (token < tokens) to[0] = rounded(v.x), to[8] = rounded(v.z);
  if (token + 1 < tokens) to[EXPERTS] = rounded(v.y), to[EXPERTS + 8] = rounded(v.w);
}

// Each CTA sums its warps, gives every CTA of the cluster the part that it owns, and sums and writes the part it owns itself.
__device__ __forceinline__ void reduce(const float4 (&sums)[WARPS][QUADS], float4 (&parts)[SPLIT][SHARE], u64* barrier, Out* logits,
                                       int first_expert, int tokens) {
  const int rank = blockIdx.x % SPLIT;
  __syncthreads();
  cluster_wait();  // all CTAs have begun, so their shared memory is there
  for (int i = threadIdx.x; i < QUADS; i += WARPS * 32) {
    float4 sum = sums[0][i];
#pragma unroll
    for (int warp = 1; warp < WARPS; ++warp) add(sum, sums[warp][i]);
    push(&parts[rank][i % SHARE], barrier, i / SHARE, sum);
  }
  if (threadIdx.x >= SHARE) return;
  barrier_wait(barrier, 0);
  for (int i = threadIdx.x; i < SHARE; i += WARPS * 32) write(logits, rank * SHARE + i, sum_of(parts, i), first_expert, tokens);
}

struct Fragments {
  uint4 a[2 * EXPERT_TILES], b[TOKEN_TILES];
  __device__ __forceinline__ void load_a(const bf16* from) {
#pragma unroll
    for (int i = 0; i < 2 * EXPERT_TILES; ++i) a[i] = load_weights(from + i * 8 * HIDDEN);
  }
  // Beyond the last token that one again: its sums are not written.
  __device__ __forceinline__ void load_b(const bf16* from, int row, int tokens) {
#pragma unroll
    for (int i = 0; i < TOKEN_TILES; ++i) b[i] = load_input(from + (size_t)min(i * 8 + row, tokens - 1) * HIDDEN);
  }
  __device__ __forceinline__ void multiply(float4 (&sum)[CHAINS][TILES]) const {
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      const uint4 low = a[tile / TOKEN_TILES * 2], high = a[tile / TOKEN_TILES * 2 + 1], t = b[tile % TOKEN_TILES];
      mma(sum[0][tile], low.x, high.x, low.y, high.y, t.x, t.y);
      mma(sum[CHAINS - 1][tile], low.z, high.z, low.w, high.w, t.z, t.w);
    }
  }
};

// The first half of the cluster's barrier, and of the one that counts what comes.
__device__ __forceinline__ void meet(u64* barrier, u32 bytes) {
  if (threadIdx.x == 0) expect_from_cluster(barrier, bytes);
  __syncwarp();
  cluster_arrive();
}

extern "C" __global__ void __cluster_dims__(SPLIT, 1, 1) __launch_bounds__(WARPS * 32, 1)
router_gemm(const bf16* __restrict__ x, const bf16* __restrict__ weight, Out* __restrict__ logits, int tokens) {
  __shared__ float4 sums[WARPS][QUADS], parts[SPLIT][SHARE];
  __shared__ u64 barrier;
  if (STREAMED) meet(&barrier, sizeof(parts));  // before the loads: 0.5 us less from memory, 0.1 to 0.3 more from the L2
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = lane / 4, column = lane % 4;
  const int first_expert = blockIdx.x / SPLIT * 16 * EXPERT_TILES;
  const int begin = (blockIdx.x % SPLIT * WARPS + warp) * CHUNKS * CHUNK + column * 8;
  const bf16* w = weight + (size_t)(first_expert + row) * HIDDEN + begin;
  Fragments ring[DEPTH];
#pragma unroll
  for (int i = 0; i < DEPTH; ++i) ring[i].load_a(w + i * CHUNK);
  if (!STREAMED) meet(&barrier, sizeof(parts));
  wait_for_inputs();
#pragma unroll
  for (int i = 0; i < DEPTH; ++i) ring[i].load_b(x + begin + i * CHUNK, row, tokens);
  float4 sum[CHAINS][TILES] = {};
#pragma unroll
  for (int chunk = 0; chunk < CHUNKS; ++chunk) {
    Fragments& now = ring[chunk % DEPTH];
    now.multiply(sum);
    if (chunk + DEPTH < CHUNKS) {
      now.load_a(w + (chunk + DEPTH) * CHUNK);
      now.load_b(x + begin + (chunk + DEPTH) * CHUNK, row, tokens);
    }
  }
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
    if (CHAINS > 1) add(sum[0][tile], sum[CHAINS - 1][tile]);
    sums[warp][tile * 32 + lane] = sum[0][tile];
  }
  reduce(sums, parts, &barrier, logits, first_expert, tokens);
}

#endif
