// logits [tokens, EXPERTS] = x [tokens, HIDDEN] * weight [EXPERTS, HIDDEN]^T for 33 to 64 tokens, BF16 in, FP32 out, on Hopper's
// matrix instructions: tokens are their 64 rows, 32 experts their columns. A cluster of eight CTAs shares these experts, each takes
// an eighth of HIDDEN and has all of it on its way at once, through TMA, which gives zeros beyond the last token without reading.
//
// x is read by every cluster: fewer, of more experts, would read less, but too few multiprocessors then read. Of 128 CTAs, not
// all clusters of eight would fit at once. Compiled by NVRTC: HIDDEN, EXPERTS. Needs sm_90a.

#include "../numerics.cuh"
#include "../wgmma.cuh"
#include "../cluster.cuh"

constexpr int SPLIT = 8, COLUMNS = 32, OWN = HIDDEN / SPLIT, CHUNKS = OWN / 64;
constexpr int X_BYTES = 64 * 128, W_BYTES = COLUMNS * 128, STAGE = X_BYTES + W_BYTES;
constexpr int QUADS = 128 * COLUMNS / 8, SHARE = QUADS / SPLIT;  // four sums a thread and 8 columns

static_assert(CHUNKS * 64 * SPLIT == HIDDEN && EXPERTS % COLUMNS == 0, "the shape must split evenly");

// sum [64, 32] = (or +=) a [64, 16] * b [32, 16]^T, both in shared memory, rows along the inner axis
__device__ __forceinline__ void wgmma_32(float (&s)[16], u64 a, u64 b, int add) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %18, 0; wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {" PLACES_16
      "}, %16, %17, p, 1, 1, 0, 0; }"
      : SUMS_16(s, 0) : "l"(a), "l"(b), "r"(add));
}

// A thread's four sums of 8 columns: two experts of a token, and of the token 8 further.
__device__ __forceinline__ void write(float* logits, int quad, float4 v, int first_expert, int tokens) {
  const int thread = quad % 128, token = thread / 32 * 16 + thread % 32 / 4;
  float* to = logits + (size_t)token * EXPERTS + first_expert + quad / 128 * 8 + thread % 4 * 2;
  if (token < tokens) *(float2*)to = make_float2(v.x, v.y);
  if (token + 8 < tokens) *(float2*)(to + 8 * EXPERTS) = make_float2(v.z, v.w);
}

extern "C" __global__ void __cluster_dims__(SPLIT, 1, 1) __launch_bounds__(128, 1)
router_gemm_many(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap weight, float* __restrict__ logits,
                 int tokens) {
  extern __shared__ char memory[];
  __shared__ float4 parts[SPLIT][SHARE];
  __shared__ u64 loaded[CHUNKS], summed;
  const u32 stages = (shared_address(memory) + 1023) / 1024 * 1024;
  const int rank = blockIdx.x % SPLIT, first_expert = blockIdx.x / SPLIT * COLUMNS;
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
      copy_tile(stages + i * STAGE + X_BYTES, &weight, rank * OWN + i * 64, first_expert, &loaded[i]);
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
      wgmma_32(sum, descriptor(stages + i * STAGE + k * 32, 16), descriptor(stages + i * STAGE + X_BYTES + k * 32, 16), i || k);
    wgmma_commit();
  }
  wgmma_wait<0>();
  cluster_wait();  // all CTAs have begun, so their shared memory is there
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; ++j) {
    const int i = j * 128 + threadIdx.x;
    push(&parts[rank][i % SHARE], &summed, i / SHARE, make_float4(sum[4 * j], sum[4 * j + 1], sum[4 * j + 2], sum[4 * j + 3]));
  }
  if (threadIdx.x >= SHARE) return;
  barrier_wait(&summed, 0);
  write(logits, rank * SHARE + threadIdx.x, sum_of(parts, threadIdx.x), first_expert, tokens);
}
