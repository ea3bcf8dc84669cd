// Sums over the CTAs of a cluster: each writes into the shared memory of the one that owns a part, whose transaction barrier counts
// what has come. No fence of all memory, as a cluster's barrier with release and acquire has (0.3 us on an H200). After wgmma.cuh.

// The cluster's barrier in two halves; between them other work may go on. What was written before it is not made visible.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// By one thread, before `cluster_arrive`: the barrier's first phase ends when so many bytes have come. Others send after `cluster_wait`.
__device__ __forceinline__ void expect_from_cluster(u64* barrier, u32 bytes) {
  barrier_init(barrier, 1);
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  barrier_expect(barrier, bytes);
}

// Writes into the shared memory of the cluster's CTA `rank`, at this CTA's address `mine`, and counts there on its `barrier`.
__device__ __forceinline__ void push(float4* mine, u64* barrier, int rank, float4 v) {
  asm volatile(
      "{ .reg .u32 there, counted; mapa.shared::cluster.u32 there, %0, %2; mapa.shared::cluster.u32 counted, %1, %2;"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [there], {%3, %4, %5, %6}, [counted]; }"
      :: "r"(shared_address(mine)), "r"(shared_address(barrier)), "r"(rank), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}

__device__ __forceinline__ void add(float4& sum, float4 more) {
  sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
}

// Part i of every CTA, in their order.
template <int RANKS, int COUNT>
__device__ __forceinline__ float4 sum_of(const float4 (&parts)[RANKS][COUNT], int i) {
  float4 sum = parts[0][i];
#pragma unroll
  for (int other = 1; other < RANKS; ++other) add(sum, parts[other][i]);
  return sum;
}
