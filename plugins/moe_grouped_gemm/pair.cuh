// Clusters of two CTAs: each has the same stages in the same order, so that one copy can serve both.

__device__ __forceinline__ int cluster_rank() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// All threads of both wait for each other.
__device__ __forceinline__ void cluster_meet() {
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// `copy_tile` to the same place of both CTAs, completing on the same barrier of each.
__device__ __forceinline__ void copy_tile_to_both(u32 tile, const TensorMap* map, int column, int row, u64* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%2, %3}], [%4], %5;"
      :: "r"(tile), "l"((u64)map), "r"(column), "r"(row), "r"(shared_address(barrier)), "h"((u16)3) : "memory");
}

// Half of the weights, or of their scales; of the same weights each CTA loads one half.
__device__ __forceinline__ void copy_half(char* to, const TensorMap* map, int column, const Item& item, int half, int rank,
                                          u64* full) {
  const u32 place = shared_address(to);
  if (CTAS == 1 || !item.same_weights) copy_tile(place, map, column, item.weight_row(half), full);
  else if (half == rank) copy_tile_to_both(place, map, column, item.weight_row(half), full);
}

// 128 bytes of each of an item's rows, 32 rows at a time and then 8; of the same rows each CTA loads every other piece.
__device__ __forceinline__ void copy_rows(char* panel, const Maps& maps, const Item& item, int column, int rank, u64* full) {
  const int boxes = item.boxes();
  for (int i = 0, turn = 0; i < boxes; ++turn) {
    const int count = boxes - i < 4 ? 1 : 4;
    const TensorMap* map = count == 1 ? maps.rows : maps.more_rows;
    const u32 place = shared_address(panel) + i * BOX;
    if (CTAS == 1 || item.same_weights) copy_tile(place, map, column, item.slot + 8 * i, full);
    else if (turn % 2 == rank) copy_tile_to_both(place, map, column, item.slot + 8 * i, full);
    i += count;
  }
}

// A warp has read a stage: the barriers of all CTAs that write to it hear so.
__device__ __forceinline__ void release(u64* empty) {
  __syncwarp();
  if (threadIdx.x % 32 >= CTAS) return;
  asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; mbarrier.arrive.shared::cluster.b64 _, [there]; }"
               :: "r"(shared_address(empty)), "r"(threadIdx.x % 32) : "memory");
}
