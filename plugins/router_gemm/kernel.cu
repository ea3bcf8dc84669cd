// logits [tokens, EXPERTS] = x [tokens, HIDDEN] * weight [EXPERTS, HIDDEN]^T, BF16 in, FP32 (or BF16) out, for up to 64 tokens.
//
// The time is that of latencies and of reading 3.7 MB of weights once, so all multiprocessors must read: a cluster of SPLIT
// CTAs shares 16 * EXPERT_TILES experts, each CTA takes a share of HIDDEN, each warp a share of that. Weights are mma's A
// (16 experts), tokens its B (8 tokens). Fragments come straight from global memory, 16 bytes a lane: the sum over HIDDEN
// may go in any order, so a lane's eight consecutive elements stand for the places that mma has for it in two steps, alike in
// A and B. Sums go up in a fixed order: warps through shared memory, CTAs through the cluster's. The same result every time.
//
// One or two tokens are half a microsecond faster without tensor cores and clusters, a CTA an expert (router_gemm_few).
//
// Weights do not depend on the kernel before: with programmatic dependent launch they are loaded while it still runs. The choice of
// experts is a kernel of its own: with dependent launch both take 3.2 us at 1 token, 3.5 at 8, 3.9 at 16 on an H200; with the last
// CTA choosing, found by a counter, one kernel took 4.0, 5.3 and 6.9 there (2026-11-30).
//
// Compiled by NVRTC for one shape: HIDDEN and EXPERTS; TOKENS, or TOKEN_TILES (of 8) and WARPS with SPLIT and EXPERT_TILES or with
// DEPTH; BF16_OUT. Needs sm_90.

#include "../numerics.cuh"

typedef unsigned short bf16;

#if BF16_OUT
typedef bf16 Out;
__device__ __forceinline__ Out rounded(float value) { return (bf16)bf16_pair(value, 0.f); }
#else
typedef float Out;
__device__ __forceinline__ Out rounded(float value) { return value; }
#endif

constexpr int LOADED = 8;  // elements that a lane loads at a time
constexpr int CHUNK = 32;  // elements of HIDDEN that a warp takes at a time

__device__ __forceinline__ void mma(float (&sum)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

#ifdef TOKENS

constexpr int FEW_THREADS = 128, TURNS = HIDDEN / (FEW_THREADS * LOADED);

static_assert(TURNS * FEW_THREADS * LOADED == HIDDEN, "the shape must split evenly");

// Two BF16 in a word, the first in the lower half.
__device__ __forceinline__ float dot(u32 a, u32 b, float sum) {
  sum = fmaf(__uint_as_float(a << 16), __uint_as_float(b << 16), sum);
  return fmaf(__uint_as_float(a & 0xFFFF0000u), __uint_as_float(b & 0xFFFF0000u), sum);
}

extern "C" __global__ void __launch_bounds__(FEW_THREADS)
router_gemm_few(const bf16* __restrict__ x, const bf16* __restrict__ weight, Out* __restrict__ logits) {
  __shared__ float sums[FEW_THREADS / 32][TOKENS];
  const int begin = threadIdx.x * LOADED;
  uint4 w[TURNS], v[TOKENS][TURNS];
#pragma unroll
  for (int i = 0; i < TURNS; ++i)
    w[i] = *(const uint4*)(weight + (size_t)blockIdx.x * HIDDEN + begin + i * FEW_THREADS * LOADED);
  wait_for_inputs();
#pragma unroll
  for (int i = 0; i < TOKENS * TURNS; ++i)
    v[i / TURNS][i % TURNS] = *(const uint4*)(x + i / TURNS * HIDDEN + begin + i % TURNS * FEW_THREADS * LOADED);
#pragma unroll
  for (int token = 0; token < TOKENS; ++token) {
    float sum[2] = {};
#pragma unroll
    for (int i = 0; i < TURNS; ++i) {
      const uint4 a = w[i], b = v[token][i];
      sum[0] = dot(a.y, b.y, dot(a.x, b.x, sum[0]));
      sum[1] = dot(a.w, b.w, dot(a.z, b.z, sum[1]));
    }
    float all = sum[0] + sum[1];
#pragma unroll
    for (int distance = 16; distance; distance /= 2) all += __shfl_xor_sync(~0u, all, distance);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32][token] = all;
  }
  __syncthreads();
  if (threadIdx.x >= TOKENS) return;
  float all = 0.f;
#pragma unroll
  for (int warp = 0; warp < FEW_THREADS / 32; ++warp) all += sums[warp][threadIdx.x];
  logits[(size_t)threadIdx.x * EXPERTS + blockIdx.x] = rounded(all);
}

#elif defined(DEPTH)

// Many experts: a CTA takes 16 of them over all of HIDDEN, so that no cluster is needed; DEPTH chunks of a warp are on their way.
constexpr int CHUNKS = HIDDEN / WARPS / CHUNK, OWN_TOKENS = 8 * TOKEN_TILES, SUMS = 16 * OWN_TOKENS;

static_assert(CHUNKS * CHUNK * WARPS == HIDDEN && EXPERTS % 16 == 0 && DEPTH <= CHUNKS, "the shape must split evenly");

// Weights: neighbours in a row come from memory together, and the other half of 128 bytes from L1.
__device__ __forceinline__ uint4 load_weights(const bf16* from) {
  uint4 v;
  asm volatile("ld.global.nc.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
  return v;
}

// Beyond the last token that one again: its sums are not written.
__device__ __forceinline__ void load_tokens(uint4 (&b)[TOKEN_TILES], const bf16* x, int row, int tokens) {
#pragma unroll
  for (int tile = 0; tile < TOKEN_TILES; ++tile) b[tile] = *(const uint4*)(x + (size_t)min(tile * 8 + row, tokens - 1) * HIDDEN);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
router_gemm_wide(const bf16* __restrict__ x, const bf16* __restrict__ weight, Out* __restrict__ logits, int tokens) {
  __shared__ float sums[WARPS][SUMS];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = lane / 4, column = lane % 4;
  const int begin = warp * CHUNKS * CHUNK + column * LOADED;
  const bf16* w = weight + (size_t)(blockIdx.x * 16 + row) * HIDDEN + begin;
  uint4 a[DEPTH][2], b[DEPTH][TOKEN_TILES];
#pragma unroll
  for (int i = 0; i < DEPTH; ++i) a[i][0] = load_weights(w + i * CHUNK), a[i][1] = load_weights(w + 8 * HIDDEN + i * CHUNK);
  wait_for_inputs();
#pragma unroll
  for (int i = 0; i < DEPTH; ++i) load_tokens(b[i], x + begin + i * CHUNK, row, tokens);
  float sum[TOKEN_TILES][4] = {};
#pragma unroll
  for (int chunk = 0; chunk < CHUNKS; ++chunk) {
    const int slot = chunk % DEPTH;
    const uint4 low = a[slot][0], high = a[slot][1];
#pragma unroll
    for (int tile = 0; tile < TOKEN_TILES; ++tile) {
      mma(sum[tile], low.x, high.x, low.y, high.y, b[slot][tile].x, b[slot][tile].y);
      mma(sum[tile], low.z, high.z, low.w, high.w, b[slot][tile].z, b[slot][tile].w);
    }
    if (chunk + DEPTH < CHUNKS) {
      const int next = (chunk + DEPTH) * CHUNK;
      a[slot][0] = load_weights(w + next), a[slot][1] = load_weights(w + 8 * HIDDEN + next);
      load_tokens(b[slot], x + begin + next, row, tokens);
    }
  }
#pragma unroll
  for (int tile = 0; tile < TOKEN_TILES; ++tile)
#pragma unroll
    for (int i = 0; i < 4; ++i)  // expert row or row + 8, token 2 * column or the next
      sums[warp][(tile * 8 + column * 2 + i % 2) * 16 + row + i / 2 * 8] = sum[tile][i];
  __syncthreads();
  for (int i = threadIdx.x; i < SUMS; i += WARPS * 32) {
    float all = sums[0][i];
#pragma unroll
    for (int other = 1; other < WARPS; ++other) all += sums[other][i];
    if (i / 16 < tokens) logits[(size_t)(i / 16) * EXPERTS + blockIdx.x * 16 + i % 16] = rounded(all);
  }
}

#else

constexpr int CHUNKS = HIDDEN / SPLIT / WARPS / CHUNK;
constexpr int OWN_EXPERTS = 16 * EXPERT_TILES, OWN_TOKENS = 8 * TOKEN_TILES, SUMS = OWN_EXPERTS * OWN_TOKENS;

static_assert(CHUNKS * CHUNK * WARPS * SPLIT == HIDDEN && EXPERTS % OWN_EXPERTS == 0, "the shape must split evenly");

// The cluster's barrier in two halves; between them other work may go on.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Writes a float into the shared memory of the cluster's CTA `rank`, at this CTA's address `mine`.
__device__ __forceinline__ void push(float* mine, int rank, float value) {
  asm volatile("{ .reg .u32 there; mapa.shared::cluster.u32 there, %0, %1; st.shared::cluster.f32 [there], %2; }"
               :: "r"((u32)__cvta_generic_to_shared(mine)), "r"(rank), "f"(value) : "memory");
}

constexpr int SHARE = SUMS / SPLIT;

// Each CTA sums its warps, gives every CTA of the cluster the part that it owns, and sums and writes the part it owns itself.
__device__ __forceinline__ void reduce(const float (&sums)[WARPS][SUMS], float (&parts)[SPLIT][SHARE], Out* logits,
                                       int first_token, int first_expert, int tokens) {
  __syncthreads();
  cluster_wait();  // all CTAs have begun, so their shared memory is there
  for (int i = threadIdx.x; i < SUMS; i += WARPS * 32) {
    float sum = sums[0][i];
#pragma unroll
    for (int warp = 1; warp < WARPS; ++warp) sum += sums[warp][i];
    push(&parts[blockIdx.x][i % SHARE], i / SHARE, sum);
  }
  cluster_arrive();
  cluster_wait();
  for (int i = threadIdx.x; i < SHARE; i += WARPS * 32) {
    const int place = blockIdx.x * SHARE + i, token = first_token + place / OWN_EXPERTS;
    float sum = parts[0][i];
#pragma unroll
    for (int rank = 1; rank < SPLIT; ++rank) sum += parts[rank][i];
    if (token < tokens) logits[(size_t)token * EXPERTS + first_expert + place % OWN_EXPERTS] = rounded(sum);
  }
}

extern "C" __global__ void __cluster_dims__(SPLIT, 1, 1) __launch_bounds__(WARPS * 32, 1)
router_gemm(const bf16* __restrict__ x, const bf16* __restrict__ weight, Out* __restrict__ logits, int tokens) {
  __shared__ float sums[WARPS][SUMS], parts[SPLIT][SHARE];
  cluster_arrive();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = lane / 4, column = lane % 4;
  const int first_expert = blockIdx.y * OWN_EXPERTS, first_token = blockIdx.z * OWN_TOKENS;
  const int begin = (blockIdx.x * WARPS + warp) * CHUNKS * CHUNK + column * LOADED;
  uint4 a[CHUNKS][EXPERT_TILES][2];
#pragma unroll
  for (int chunk = 0; chunk < CHUNKS; ++chunk)
#pragma unroll
    for (int tile = 0; tile < EXPERT_TILES * 2; ++tile)
      a[chunk][tile / 2][tile % 2] =
          *(const uint4*)(weight + (size_t)(first_expert + tile * 8 + row) * HIDDEN + begin + chunk * CHUNK);
  wait_for_inputs();
  float sum[EXPERT_TILES][TOKEN_TILES][4] = {};
#pragma unroll
  for (int chunk = 0; chunk < CHUNKS; ++chunk) {
    uint4 b[TOKEN_TILES];
#pragma unroll
    for (int tile = 0; tile < TOKEN_TILES; ++tile) {
      const int token = first_token + tile * 8 + row;
      b[tile] = make_uint4(0, 0, 0, 0);
      if (token < tokens) b[tile] = *(const uint4*)(x + (size_t)token * HIDDEN + begin + chunk * CHUNK);
    }
#pragma unroll
    for (int e = 0; e < EXPERT_TILES; ++e) {
      const uint4 low = a[chunk][e][0], high = a[chunk][e][1];
#pragma unroll
      for (int tile = 0; tile < TOKEN_TILES; ++tile) {
        mma(sum[e][tile], low.x, high.x, low.y, high.y, b[tile].x, b[tile].y);
        mma(sum[e][tile], low.z, high.z, low.w, high.w, b[tile].z, b[tile].w);
      }
    }
  }
#pragma unroll
  for (int e = 0; e < EXPERT_TILES; ++e)
#pragma unroll
    for (int tile = 0; tile < TOKEN_TILES; ++tile)
#pragma unroll
      for (int i = 0; i < 4; ++i)  // expert row or row + 8, token 2 * column or the next
        sums[warp][(tile * 8 + column * 2 + i % 2) * OWN_EXPERTS + e * 16 + row + i / 2 * 8] = sum[e][tile][i];
  reduce(sums, parts, logits, first_token, first_expert, tokens);
}

#endif
