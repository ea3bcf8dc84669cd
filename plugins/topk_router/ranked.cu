// DeepSeek-V3/R1's routing, 8 of 256 experts in 4 of 8 groups: one warp a token, as in kernel.cu, which has all other forms.
//
// That one sorts and picks, and each of its eight picks waits for the one before. Here a value's rank is how many are larger, and
// all lanes count at once what they read from shared memory: first 8 groups; then the 32 fours of adjacent experts in the kept
// groups, by their largest (the eight best of them hold the eight best experts); then these 32 experts. To count is to add up
// differences times 2^120, each held between 0 and 1: multiply-adds, without comparisons or predicates.
//
// A smaller value never counts less than a larger one. So ranks that are all different are right, and so are the best of groups and
// fours if they are as many as asked for. Experts that share a rank are put in order, if there are two of it; where groups or fours
// share the last rank, and with NaN, the token is routed once more by comparisons.
//
// Compiled by NVRTC with kernel.cu's macros: EXPERTS, GROUPS, KEPT, TOP_K, NORMALIZE. Launch with WARPS warps a block.

#include "../numerics.cuh"
#include "common.cuh"

constexpr int WARPS = 4;
constexpr int OWN = EXPERTS / 32, LANES = 32 / GROUPS;  // experts of a lane; lanes of a group
constexpr float HUGE_SCALE = 0x1p120f;
constexpr float LAST = 7.5f;  // the eight best have ranks below

// What lanes add up to: a bit for each rank of a chosen expert, and their number. Eight powers of two make 255 only if all are
// different, and 32 lanes do not reach from one field into the next.
constexpr int COUNT_BIT = 13;
constexpr u32 RIGHT = 255u | 8u << COUNT_BIT;

static_assert(OWN == 8 && GROUPS == 8 && KEPT == 4 && TOP_K == 8, "two fours a lane, 32 in the groups that are kept");

// What the lanes of a token tell each other. Fours are numbered so that lanes have `lane` and `lane + 32`, for fewer conflicts.
struct alignas(16) Token {
  float4 scores[64];
  float4 choices[2][32];  // of the first and second four of the kept groups' lanes, as the next two
  int numbers[2][32];
  float tops[2][32];
  float groups[GROUPS];
  float4 candidates[8];  // choices of the best fours
  int fours[8];          // their numbers
  float chosen[TOP_K];   // scores, best first
};

__device__ __forceinline__ int expert_of(int four, int place) { return four % 32 * OWN + four / 32 * 4 + place; }
__device__ __forceinline__ int four_of(int expert) { return expert / OWN + expert / 4 % 2 * 32; }

// How many of the lanes are before this one.
__device__ __forceinline__ int lower(u32 lanes, int lane) { return __popc(lanes & ((1u << lane) - 1)); }

// Shared memory in the order of the program: first what others wait for.
#ifdef __CUDA_ARCH__
__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ float4 get(const float4* from) {
  float4 v;
  asm volatile("ld.volatile.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(shared_address(from)));
  return v;
}
__device__ __forceinline__ float get(const float* from) {
  float v;
  asm volatile("ld.volatile.shared.f32 %0, [%1];" : "=f"(v) : "r"(shared_address(from)));
  return v;
}
__device__ __forceinline__ int get(const int* from) {
  int v;
  asm volatile("ld.volatile.shared.s32 %0, [%1];" : "=r"(v) : "r"(shared_address(from)));
  return v;
}
__device__ __forceinline__ uint4 get(const uint4* from) {
  uint4 v;
  asm volatile("ld.volatile.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(shared_address(from)));
  return v;
}
__device__ __forceinline__ void put(uint4* to, uint4 v) {
  asm volatile("st.volatile.shared.v4.u32 [%0], {%1, %2, %3, %4};"
               :: "r"(shared_address(to)), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w));
}
__device__ __forceinline__ void put(float4* to, float4 v) {
  asm volatile("st.volatile.shared.v4.f32 [%0], {%1, %2, %3, %4};"
               :: "r"(shared_address(to)), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w));
}
__device__ __forceinline__ void put(float* to, float v) {
  asm volatile("st.volatile.shared.f32 [%0], %1;" :: "r"(shared_address(to)), "f"(v));
}
__device__ __forceinline__ void put(int* to, int v) {
  asm volatile("st.volatile.shared.s32 [%0], %1;" :: "r"(shared_address(to)), "r"(v));
}
#else
template <class T> static T get(const T* from) { return *from; }
template <class T> static void put(T* to, T v) { *to = v; }
#endif

__device__ __forceinline__ float score_of(const Token& token, int four, int place) {
  return get((const float*)(token.scores + four) + place);
}

__device__ __forceinline__ float sum(float4 v) { return (v.x + v.y) + (v.z + v.w); }

// Of the chosen experts' scores.
__device__ __forceinline__ float normalizer(Token& token) {
  const float4* best = (const float4*)token.chosen;
  return near_reciprocal(sum(get(best)) + sum(get(best + 1)) + 1e-20f);
}

__device__ __forceinline__ void best_two(float4 v, float& first, float& second) {
  first = fmaxf(v.x, v.y), second = fminf(v.x, v.y);
  merge(first, second, fmaxf(v.z, v.w), fminf(v.z, v.w));
}

// How many of the values are larger. What is so by less than 2^-120 counts as a part of one.
template <int FOURS>
__device__ __forceinline__ float larger(const float4 (&all)[FOURS], float mine) {
  const float minus = mine * -HUGE_SCALE;
  float4 sums;
#pragma unroll
  for (int i = 0; i < FOURS; ++i) {
    const float x = __saturatef(fmaf(all[i].x, HUGE_SCALE, minus)), y = __saturatef(fmaf(all[i].y, HUGE_SCALE, minus));
    const float z = __saturatef(fmaf(all[i].z, HUGE_SCALE, minus)), w = __saturatef(fmaf(all[i].w, HUGE_SCALE, minus));
    sums.x = i ? sums.x + x : x, sums.y = i ? sums.y + y : y;
    sums.z = i ? sums.z + z : z, sums.w = i ? sums.w + w : w;
  }
  return sum(sums);
}

// To the nearest whole number, below 8.
__device__ __forceinline__ int whole(float count) { return __float_as_uint(count + 0x1p23f) & 7; }

// Whether this lane's group is among the KEPT best, by the sum of its two largest choices.
__device__ __forceinline__ bool group_kept(Token& token, float first, float second, int lane) {
#pragma unroll
  for (int distance = 1; distance < LANES; distance *= 2)
    merge(first, second, __shfl_xor_sync(~0u, first, distance), __shfl_xor_sync(~0u, second, distance));
  if (lane % LANES == 0) put(token.groups + lane / LANES, first + second);
  __syncwarp();
  const float4* groups = (const float4*)token.groups;
  const float4 all[2] = {get(groups), get(groups + 1)};
  return larger(all, first + second) < KEPT - 0.5f;
}

// Finds the eight best fours, a bit for the lane of each, and puts them where candidates are.
__device__ __forceinline__ u32 keep_fours(Token& token, const float4 (&choices)[2], const float (&tops)[2], u32 kept, int lane) {
  const int place = lower(kept, lane), half = lane / 16, at = lane % 16;
  const bool here = kept >> lane & 1;
  if (here) put(token.tops[0] + place, tops[0]), put(token.tops[1] + place, tops[1]);
  __syncwarp();
  const float top = get(token.tops[half] + at);
  float4 all[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) all[i] = get((const float4*)token.tops[i / 4] + i % 4);
  if (here) {
    put(token.choices[0] + place, choices[0]), put(token.choices[1] + place, choices[1]);
    put(token.numbers[0] + place, lane), put(token.numbers[1] + place, lane + 32);
  }
  __syncwarp();
  const float4 four = get(token.choices[half] + at);
  const int number = get(token.numbers[half] + at);
  const bool best = larger(all, top) < LAST;
  const u32 all_best = __ballot_sync(~0u, best);
  const int slot = lower(all_best, lane);
  if (best && slot < 8) put(token.candidates + slot, four), put(token.fours + slot, number);
  __syncwarp();
  return all_best;
}

__device__ __forceinline__ u32 top_of_four(uint4 v) { return max(max(v.x, v.y), max(v.z, v.w)); }

// How many of the keys come before the one at `place`: larger ones, and equal ones before it.
template <int FOURS>
__device__ __forceinline__ int ahead(const uint4* keys, int place) {
  const u32 mine = (u32)get((const int*)keys + place);
  int count = 0;
#pragma unroll
  for (int i = 0; i < FOURS; ++i) {
    const uint4 v = get(keys + i);
    const int before = place - 4 * i;
    count += v.x > mine || (v.x == mine && 0 < before), count += v.y > mine || (v.y == mine && 1 < before);
    count += v.z > mine || (v.z == mine && 2 < before), count += v.w > mine || (v.w == mine && 3 < before);
  }
  return count;
}

// Whether this lane's group is among the KEPT best.
__device__ __forceinline__ bool group_kept_exactly(Token& token, const u32 (&keys)[OWN], int lane) {
  u32 best = 0, next = 0;
#pragma unroll
  for (int i = 0; i < OWN; ++i) merge(best, next, keys[i], 0u);
#pragma unroll
  for (int distance = 1; distance < LANES; distance *= 2)
    merge(best, next, __shfl_xor_sync(~0u, best, distance), __shfl_xor_sync(~0u, next, distance));
  if (lane % LANES == 0) put((int*)token.groups + lane / LANES, (int)key_of(value_of(best) + value_of(next)));
  __syncwarp();
  return ahead<GROUPS / 4>((const uint4*)token.groups, lane / LANES) < KEPT;
}

// The same once more by keys, which are all comparable, in the order of experts: of equal ones the first. Not inline: it would cost
// the others registers.
__device__ __noinline__ void route_exactly(Token& token, const float* bias, float* weights, int* indices, float scale, int lane) {
  alignas(16) u32 keys[OWN];
#pragma unroll
  for (int i = 0; i < OWN; ++i) keys[i] = key_of(score_of(token, lane + i / 4 * 32, i % 4) + bias[lane * OWN + i]);
  const bool kept = group_kept_exactly(token, keys, lane);
  const int place = 2 * lower(__ballot_sync(~0u, kept), lane);
  uint4 *fours = (uint4*)token.choices, *tops = (uint4*)token.tops, *candidates = (uint4*)token.candidates;
  if (kept) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 four = ((const uint4*)keys)[half];
      put((int*)tops + place + half, (int)top_of_four(four)), put(fours + place + half, four);
      put(token.numbers[0] + place + half, lane * OWN + 4 * half);
    }
  }
  __syncwarp();
  const bool best = ahead<8>(tops, lane) < 8;
  const int slot = lower(__ballot_sync(~0u, best), lane);
  if (best) put(candidates + slot, get(fours + lane)), put(token.fours + slot, get(token.numbers[0] + lane));
  __syncwarp();
  const int rank = ahead<8>(candidates, lane), expert = get(token.fours + lane / 4) + lane % 4;
  const float score = score_of(token, four_of(expert), expert % 4);
  if (rank < TOP_K) put(token.chosen + rank, score);
  __syncwarp();
  float weight = score * scale;
  if constexpr (NORMALIZE) weight *= normalizer(token);
  if (rank < TOP_K) weights[rank] = weight, indices[rank] = expert;
}

__device__ __forceinline__ bool behind_rival(Token& token, int rank, int expert, bool chosen) {
  const int lane = threadIdx.x % 32;
  int* place = token.numbers[0] + rank;
  if (chosen) put(place, lane);
  __syncwarp();
  int rival = chosen ? get(place) : lane;
  const bool lost = rival != lane;
  __syncwarp();
  if (lost) put(place, lane);
  __syncwarp();
  if (chosen && !lost) rival = get(place);
  const float* choices = (const float*)token.candidates;
  const float mine = get(choices + lane), other = get(choices + rival);
  return other > mine || (other == mine && expert_of(get(token.fours + rival / 4) & 63, rival % 4) < expert);
}

// Experts that share a rank in their order: by choice, as a rank tells apart neither differences below 2^-120 nor choices of 256 and
// more, and equal ones by number. False where that was not all.
__device__ __noinline__ bool settle(Token& token, float* weights, int* indices, float score, float scale, int rank, int expert,
                                    bool chosen) {
  rank += behind_rival(token, rank, expert, chosen);
  chosen = chosen && rank < TOP_K;
  if (chosen) put(token.chosen + rank, score);
  __syncwarp();
  float weight = score * scale;
  if constexpr (NORMALIZE) weight *= normalizer(token);
  if (chosen) weights[rank] = weight, indices[rank] = expert;
  return __reduce_add_sync(~0u, chosen ? 1u << rank | 1u << COUNT_BIT : 0) == RIGHT;
}

// logits [tokens, EXPERTS] (not __restrict__: they would be loaded before the wait), bias [EXPERTS] -> weights and indices
// [tokens, TOP_K]
extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
topk_router(const float* logits, const float* __restrict__ bias, float* __restrict__ weights,
            int* __restrict__ indices, int tokens, float scale) {
  __shared__ Token shared[WARPS];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const u32 row = blockIdx.x * WARPS + warp;
  Token& token = shared[warp];
  alignas(16) float scores[OWN], biases[OWN];
  copy<OWN>(biases, bias + lane * OWN);
  wait_for_inputs();
  if (row >= tokens) return;
  copy<OWN>(scores, logits + (size_t)row * EXPERTS + lane * OWN);
#pragma unroll
  for (int i = 0; i < OWN; ++i) scores[i] = sigmoid(scores[i]), biases[i] += scores[i];
  const float4 choices[2] = {((const float4*)biases)[0], ((const float4*)biases)[1]};
  const float total = sum(choices[0]) + sum(choices[1]);
  float tops[2], seconds[2];
  best_two(choices[0], tops[0], seconds[0]);
  best_two(choices[1], tops[1], seconds[1]);
  float first = tops[0], second = seconds[0];
  merge(first, second, tops[1], seconds[1]);
  put(token.scores + lane, ((const float4*)scores)[0]), put(token.scores + lane + 32, ((const float4*)scores)[1]);

  const u32 kept = __ballot_sync(~0u, group_kept(token, first, second, lane));
  const u32 best_fours = keep_fours(token, choices, tops, kept, lane);
  const u32 nan = __ballot_sync(~0u, total != total);

  const int four = get(token.fours + lane / 4) & 63;  // any, where fewer than eight were found
  const float choice = get((const float*)token.candidates + lane);
  float4 all[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) all[i] = get(token.candidates + i);
  const float score = score_of(token, four, lane % 4);
  const float count = larger(all, choice);
  const bool chosen = count < LAST;
  const int rank = whole(count);
  if (chosen) put(token.chosen + rank, score);
  __syncwarp();
  const u32 seen = __reduce_add_sync(~0u, chosen ? 1u << rank | 1u << COUNT_BIT : 0);
  float weight = score * scale;
  if constexpr (NORMALIZE) weight *= normalizer(token);
  const size_t out = (size_t)row * TOP_K;
  if (chosen) weights[out + rank] = weight, indices[out + rank] = expert_of(four, lane % 4);
  const u32 lost = (__popc(kept) ^ KEPT * LANES) | (__popc(best_fours) ^ 8) | nan;
  if ((lost | (seen ^ RIGHT)) == 0) return;
  __syncwarp();  // what was written is written over
  if (lost == 0 && settle(token, weights + out, indices + out, score, scale, rank, expert_of(four, lane % 4), chosen)) return;
  __syncwarp();
  route_exactly(token, bias, weights + out, indices + out, scale, lane);
}
