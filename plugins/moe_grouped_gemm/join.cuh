// Clusters that share an item: each has sums of some columns, in memory, and the last one to be done adds all up, in their order.

constexpr int JOIN = 2;  // the number of a barrier

struct Sharers {
  float4* parts;  // of each CTA, both halves of all consumers
  int* arrived;   // of this item and rank
  int mine, count;

  // Whether these threads are the last, with the sums of all.
  __device__ __forceinline__ bool join(int& before, float (&sums)[2][4]) const {
    if (count == 1) return true;
    float4* own = parts + (size_t)blockIdx.x * 2 * CONSUMERS + threadIdx.x;
    for (int half = 0; half < 2; ++half)
      own[half * CONSUMERS] = make_float4(sums[half][0], sums[half][1], sums[half][2], sums[half][3]);
    __threadfence();
    rendezvous(JOIN, CONSUMERS);
    if (threadIdx.x == 0) before = atomicAdd(arrived, 1);
    rendezvous(JOIN, CONSUMERS);
    if (before != count - 1) return false;
    __threadfence();
    if (threadIdx.x == 0) *arrived = 0;
    add_up(own - mine * CTAS * 2 * CONSUMERS, sums);
    return true;
  }

  // All loads are on their way before the first is used.
  __device__ __forceinline__ void add_up(const float4* first, float (&sums)[2][4]) const {
    float4 found[MOST_SHARERS][2];
#pragma unroll
    for (int i = 0; i < MOST_SHARERS; ++i)
      for (int half = 0; half < 2; ++half)
        found[i][half] = i < count ? __ldcg(first + (i * CTAS * 2 + half) * CONSUMERS) : make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int i = 0; i < MOST_SHARERS; ++i)
      for (int half = 0; half < 2; ++half) {
        float(&sum)[4] = sums[half];
        const float4 v = found[i][half];
        sum[0] = i ? sum[0] + v.x : v.x, sum[1] = i ? sum[1] + v.y : v.y;
        sum[2] = i ? sum[2] + v.z : v.z, sum[3] = i ? sum[3] + v.w : v.w;
      }
  }
};
