// DeepSeek-V3 routing, one warp a token, but for the form that ranked.cu has.
//
// A lane owns EXPERTS/32 contiguous experts, so lanes ascend as expert indices do and the lowest lane of a ballot is the
// lowest index: ties need no wider keys. Values are compared as integers ("keys") that are ordered as the floats are, with
// NaN on top as in torch.sort. With groups, the keys of the kept groups are dealt out again over all 32 lanes through shared
// memory, in order, so that each lane sorts as few as possible. A pick is one warp maximum and one ballot.
//
// Compiled by NVRTC for one configuration: EXPERTS, GROUPS, KEPT (groups), TOP_K, NORMALIZE. Launch with any number of warps
// up to 4 a block.

#include "../numerics.cuh"
#include "common.cuh"

constexpr int MAX_WARPS = 4;
constexpr int OWN = EXPERTS / 32;              // experts of a lane
constexpr int LANES = 32 / GROUPS;             // lanes of a group
constexpr int GROUP_SIZE = EXPERTS / GROUPS;
constexpr int CANDIDATES = KEPT * GROUP_SIZE;  // experts left after the groups
constexpr int HELD = CANDIDATES / 32;          // candidates of a lane
constexpr int SPREAD = TOP_K <= 1 ? 1 : TOP_K <= 2 ? 2 : TOP_K <= 4 ? 4 : TOP_K <= 8 ? 8 : TOP_K <= 16 ? 16 : 32;
constexpr bool LIMITED = KEPT < GROUPS;

static_assert(OWN * 32 == EXPERTS && LANES * GROUPS == 32 && HELD * 32 == CANDIDATES, "experts must split evenly over 32 lanes");
static_assert(TOP_K <= 32 && TOP_K <= CANDIDATES, "more experts asked for than lanes or candidates");

// Two largest keys of this lane's group, as a tree: latency is what counts here.
__device__ __forceinline__ void best_two(const u32 (&keys)[OWN], u32& first, u32& second) {
  u32 firsts[OWN], seconds[OWN];
#pragma unroll
  for (int i = 0; i < OWN; ++i) firsts[i] = keys[i], seconds[i] = 0;
#pragma unroll
  for (int distance = 1; distance < OWN; distance *= 2)
#pragma unroll
    for (int i = 0; i + distance < OWN; i += 2 * distance)
      merge(firsts[i], seconds[i], firsts[i + distance], seconds[i + distance]);
  first = firsts[0], second = seconds[0];
#pragma unroll
  for (int distance = 1; distance < LANES; distance *= 2)
    merge(first, second, __shfl_xor_sync(~0u, first, distance), __shfl_xor_sync(~0u, second, distance));
}

// Whether this lane's group is among the KEPT best, ties by lowest index. The lanes of a group share the comparisons.
__device__ __forceinline__ bool group_kept(const u32 (&keys)[OWN], int lane) {
  const int group = lane / LANES, part = lane % LANES;
  u32 first, second;
  best_two(keys, first, second);
  const u32 mine = key_of(value_of(first) + value_of(second));
  int better = 0;
#pragma unroll
  for (int start = 0; start < GROUPS; start += LANES) {
    const int other = start + part;
    const u32 theirs = __shfl_sync(~0u, mine, other * LANES);
    const bool ahead = other < GROUPS && (theirs > mine || (theirs == mine && other < group));
    better += __popc(__ballot_sync(~0u, ahead) >> group * LANES & (u32)((1ull << LANES) - 1));
  }
  return better < KEPT;
}

// Stable descending sort: only neighbours change places, and only if out of order.
template <int COUNT>
__device__ __forceinline__ void sort(u32 (&keys)[COUNT], int (&slots)[COUNT]) {
#pragma unroll
  for (int round = 0; round < COUNT; ++round) {
#pragma unroll
    for (int i = round % 2; i + 1 < COUNT; i += 2) {
      const bool swap = keys[i + 1] > keys[i];
      const u32 high = max(keys[i], keys[i + 1]), low = min(keys[i], keys[i + 1]);
      const int ahead = swap ? slots[i + 1] : slots[i], behind = swap ? slots[i] : slots[i + 1];
      keys[i] = high, keys[i + 1] = low, slots[i] = ahead, slots[i + 1] = behind;
    }
  }
}

// Takes the TOP_K best of all lanes' sorted candidates into `picks`; of lanes that hold the same key, the lowest. Without TIES
// no round waits to learn whether there was such a pair (both of its lanes then write one place of `picks`, which race checkers
// report), and false is returned if there was: the picks are wrong then, and are taken again.
template <bool TIES>
__device__ __forceinline__ bool take(u32 (&held)[HELD], int (&slots)[HELD], int* picks, int lane) {
  u32 pairs = 0;
#pragma unroll
  for (int rank = 0; rank < TOP_K; ++rank) {
    const bool best = held[0] == __reduce_max_sync(~0u, held[0]);
    const u32 tied = __ballot_sync(~0u, best);
    const bool mine = best && (!TIES || (tied & ((1u << lane) - 1)) == 0);
    pairs |= tied & (tied - 1);
    if (mine) picks[rank] = slots[0];
#pragma unroll
    for (int i = 0; i + 1 < HELD; ++i) held[i] = mine ? held[i + 1] : held[i], slots[i] = mine ? slots[i + 1] : slots[i];
    held[HELD - 1] = mine ? 0 : held[HELD - 1];
  }
  return TIES || pairs == 0;
}

// logits [tokens, EXPERTS] (not __restrict__: they would be loaded before the wait), bias [EXPERTS] -> weights and indices
// [tokens, TOP_K]
extern "C" __global__ void __launch_bounds__(MAX_WARPS * 32)
topk_router(const float* logits, const float* __restrict__ bias, float* __restrict__ weights,
            int* __restrict__ indices, int tokens, float scale) {
  alignas(16) __shared__ u32 dealt_keys[MAX_WARPS][CANDIDATES];
  alignas(16) __shared__ float scores[MAX_WARPS][EXPERTS];
  __shared__ int kept_groups[MAX_WARPS][KEPT], picks[MAX_WARPS][TOP_K];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, token = blockIdx.x * (blockDim.x / 32) + warp;
  alignas(16) float values[OWN], biases[OWN];
  copy<OWN>(biases, bias + lane * OWN);
  wait_for_inputs();
  if (token >= tokens) return;
  const float* own_logits = logits + (size_t)token * EXPERTS;
  copy<OWN>(values, own_logits + lane * OWN);
  alignas(16) u32 keys[OWN];
#pragma unroll
  for (int i = 0; i < OWN; ++i) values[i] = sigmoid(values[i]), keys[i] = key_of(values[i] + biases[i]);
  copy<OWN>(scores[warp] + lane * OWN, values);
  alignas(16) u32 held[HELD];
  if constexpr (LIMITED) {
    const bool kept = group_kept(keys, lane);
    const int place = __popc(__ballot_sync(~0u, kept) & ((1u << lane / LANES * LANES) - 1)) / LANES;
    if (kept) {
      copy<OWN>(dealt_keys[warp] + place * GROUP_SIZE + lane % LANES * OWN, keys);
      if (lane % LANES == 0) kept_groups[warp][place] = lane / LANES;
    }
    __syncwarp();
    copy<HELD>(held, dealt_keys[warp] + lane * HELD);
  } else {
    copy<HELD>(held, keys);
  }
  alignas(16) int slots[HELD];
#pragma unroll
  for (int i = 0; i < HELD; ++i) slots[i] = lane * HELD + i;
  sort(held, slots);
  alignas(16) u32 same_held[HELD];
  alignas(16) int same_slots[HELD];
  copy<HELD>(same_held, held);
  copy<HELD>(same_slots, slots);
  if (!take<false>(held, slots, picks[warp], lane)) {
    __syncwarp();
    take<true>(same_held, same_slots, picks[warp], lane);
  }
  __syncwarp();
  int expert = 0;
  float weight = 0.f;
  if (lane < TOP_K) {
    expert = picks[warp][lane];
    if constexpr (LIMITED) expert = kept_groups[warp][expert / GROUP_SIZE] * GROUP_SIZE + expert % GROUP_SIZE;
    weight = scores[warp][expert];
  }
  if constexpr (NORMALIZE) {
    float sum = weight;
#pragma unroll
    for (int distance = 1; distance < SPREAD; distance *= 2) sum += __shfl_xor_sync(~0u, sum, distance);
    weight = __fdividef(weight, sum + 1e-20f);
  }
  if (lane >= TOP_K) return;
  weights[(size_t)token * TOP_K + lane] = weight * scale;
  indices[(size_t)token * TOP_K + lane] = expert;
}
