// Around the products: which (token, expert) pairs are whose, their rows side by side, and each token's sum afterwards.
//
// Compiled by NVRTC: HIDDEN (columns of a row, a multiple of 128), TOP_K (experts a token). Space is for all pairs, though few may
// be this rank's: blocks go round what `moe_permute` found.

#include "../numerics.cuh"

constexpr int PERMUTE_THREADS = 1024, WARPS = PERMUTE_THREADS / 32, THREADS = 256;
constexpr int AHEAD = 8;                                                       // indices that a thread loads at once
constexpr int PIECES = HIDDEN / 8, UNROLL = (PIECES + THREADS - 1) / THREADS;  // 16 bytes of a row; of them a thread's

// Sum of the values of this thread and all before it in the block. `totals`: of each warp.
__device__ __forceinline__ int sum_up_to(int value, int* totals) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int before = __shfl_sync(~0u, value, lane - distance);
    if (lane >= distance) value += before;
  }
  if (lane == 31) totals[warp] = value;
  __syncthreads();
  int before = lane < warp ? totals[lane] : 0;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) before += __shfl_xor_sync(~0u, before, distance);
  return value + before;
}

// The experts here of AHEAD pairs, from `first` on PERMUTE_THREADS apart; -1: another rank's, or none.
__device__ __forceinline__ void load_experts(int (&out)[AHEAD], const int* indices, int first, int count, int first_expert,
                                             int experts) {
#pragma unroll
  for (int j = 0; j < AHEAD; ++j) {
    const int i = first + j * PERMUTE_THREADS, expert = i < count ? indices[i] - first_expert : -1;
    out[j] = (u32)expert < (u32)experts ? expert : -1;
  }
}

// indices [count] of pairs -> offsets [experts + 1] of experts' slots, multiples of `align`; pairs [capacity], the one in each slot
// (in no order within an expert; -1: none), slots [count] where each pair is (-1: another rank's). work: the numbers of tiles of at
// most `most` rows and of slots in use, then for each tile its expert, the expert's first tile, first slot and number of rows. ends
// [experts]: the slot after each one's last row. arrivals [1024]: zeros. One block; at most 1024 experts.
extern "C" __global__ void __launch_bounds__(PERMUTE_THREADS)
moe_permute(const int* __restrict__ indices, int* __restrict__ offsets, int* __restrict__ pairs, int* __restrict__ slots,
            int4* __restrict__ work, int* __restrict__ ends, int* __restrict__ arrivals, int count, int capacity, int experts,
            int first_expert, int most, int align) {
  __shared__ int next[PERMUTE_THREADS], slot_totals[WARPS], tile_totals[WARPS], ours;
  const int thread = threadIdx.x;
  wait_for_inputs();
  next[thread] = arrivals[thread] = 0;
  __syncthreads();
  int found[AHEAD];
  for (int first = thread; first < count; first += AHEAD * PERMUTE_THREADS) {
    load_experts(found, indices, first, count, first_expert, experts);
#pragma unroll
    for (int j = 0; j < AHEAD; ++j)
      if (found[j] >= 0) atomicAdd(&next[found[j]], 1);
  }
  __syncthreads();
  const int rows = next[thread], tiles = (rows + most - 1) / most, space = (rows + align - 1) / align * align;
  const int end = sum_up_to(space, slot_totals), last_tile = sum_up_to(tiles, tile_totals);
  const int begin = end - space, tile = last_tile - tiles;
  next[thread] = begin;
  if (thread < experts) offsets[thread + 1] = end, ends[thread] = begin + rows;
  for (int i = begin + rows; i < end; ++i) pairs[i] = -1;
  for (int i = tile; i < last_tile; ++i) work[1 + i] = make_int4(thread, tile, begin, rows);
  if (thread == 0) offsets[0] = 0;
  if (thread == PERMUTE_THREADS - 1) work[0] = make_int4(last_tile, end, 0, 0), ours = end;
  __syncthreads();
  for (int first = thread; first < count; first += AHEAD * PERMUTE_THREADS) {
    load_experts(found, indices, first, count, first_expert, experts);
#pragma unroll
    for (int j = 0; j < AHEAD; ++j) {
      const int i = first + j * PERMUTE_THREADS, slot = found[j] < 0 ? -1 : atomicAdd(&next[found[j]], 1);
      if (i < count) slots[i] = slot;
      if (slot >= 0) pairs[slot] = i;
    }
  }
  for (int i = ours + thread; i < capacity; i += PERMUTE_THREADS) pairs[i] = -1;
}

// This thread's pieces of the row of a pair's token, zeros beyond the end.
__device__ __forceinline__ void load_row(uint4 (&v)[UNROLL], const uint4* x, int pair) {
#pragma unroll
  for (int i = 0; i < UNROLL; ++i) {
    const int piece = i * THREADS + threadIdx.x;
    v[i] = piece < PIECES ? x[(size_t)(pair / TOP_K) * PIECES + piece] : make_uint4(0, 0, 0, 0);
  }
}

// x BF16 [T, HIDDEN], a row at a time -> codes E4M3 [slots, HIDDEN], scales [HIDDEN / 128, stride]
extern "C" __global__ void __launch_bounds__(THREADS)
moe_gather_fp8(const uint4* __restrict__ x, const int* __restrict__ pairs, const int4* __restrict__ work, uint2* __restrict__ codes,
               float* __restrict__ scales, int stride) {
  wait_before_next();
  for (int slot = blockIdx.x, end = work[0].y; slot < end; slot += gridDim.x) {
    const int pair = pairs[slot];
    if (pair < 0) continue;
    uint4 v[UNROLL];
    load_row(v, x, pair);
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      const int piece = i * THREADS + threadIdx.x;
      const Fp8Group group(group_top<16>(top_of(v[i])));
      if (piece >= PIECES) continue;
      codes[(size_t)slot * PIECES + piece] = group.codes(v[i]);
      if (piece % 16 == 0) scales[(size_t)(piece / 16) * stride + slot] = group.scale();
    }
  }
}

// The same without quantising, each 256 columns in the order in which `nvfp4.cuh` takes them.
extern "C" __global__ void __launch_bounds__(THREADS)
moe_gather_bf16(const uint4* __restrict__ x, const int* __restrict__ pairs, const int4* __restrict__ work, u32* __restrict__ rows) {
  wait_before_next();
  for (int slot = blockIdx.x, end = work[0].y; slot < end; slot += gridDim.x) {
    const int pair = pairs[slot];
    if (pair < 0) continue;
    uint4 v[UNROLL];
    load_row(v, x, pair);
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      const int piece = i * THREADS + threadIdx.x;
      if (piece >= PIECES) continue;
      u32* words = rows + (size_t)slot * (HIDDEN / 2) + piece / 32 * 128 + piece % 8 * 16 + piece / 8 % 4;
      words[0] = __byte_perm(v[i].x, v[i].z, 0x5410), words[4] = __byte_perm(v[i].x, v[i].z, 0x7632);
      words[8] = __byte_perm(v[i].y, v[i].w, 0x5410), words[12] = __byte_perm(v[i].y, v[i].w, 0x7632);
    }
  }
}

// silu(gate) * up of eight columns, and the bits of the largest magnitude: NaN above infinity above numbers.
__device__ __forceinline__ u32 swiglu(float (&h)[8], uint4 gate, uint4 up) {
  const u32 gates[4] = {gate.x, gate.y, gate.z, gate.w}, ups[4] = {up.x, up.y, up.z, up.w};
  u32 top = LEAST_AMAX << 16;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float g = i % 2 ? second_of(gates[i / 2]) : first_of(gates[i / 2]);
    const float u = i % 2 ? second_of(ups[i / 2]) : first_of(ups[i / 2]);
    h[i] = __fdividef(g, 1.f + __expf(-g)) * u;
    top = max(top, __float_as_uint(h[i]) & 0x7FFFFFFFu);
  }
  return top;
}

// For products that leave gate and up in memory, BF16 [slots, 2 * HIDDEN]: silu(gate) * up as `moe_gather_fp8` has rows of x.
extern "C" __global__ void __launch_bounds__(THREADS)
moe_swiglu_fp8(const uint4* __restrict__ both, const int* __restrict__ pairs, const int4* __restrict__ work,
               uint2* __restrict__ codes, float* __restrict__ scales, int stride) {
  wait_before_next();
  for (int slot = blockIdx.x, end = work[0].y; slot < end; slot += gridDim.x) {
    if (pairs[slot] < 0) continue;
    const uint4* row = both + (size_t)slot * 2 * PIECES;
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      const int piece = i * THREADS + threadIdx.x, place = min(piece, PIECES - 1);
      float h[8];
      const float amax = __uint_as_float(group_top<16>(swiglu(h, row[place], row[PIECES + place])));
      const float inverse = __fdiv_rn(448.f, amax);
      if (piece >= PIECES) continue;
      u32 words[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) words[w] = e4m3_pair(h[2 * w] * inverse, h[2 * w + 1] * inverse);
      codes[(size_t)slot * PIECES + piece] = make_uint2(words[0] | words[1] << 16, words[2] | words[3] << 16);
      if (piece % 16 == 0) scales[(size_t)(piece / 16) * stride + slot] = __fdiv_rn(amax, 448.f);
    }
  }
}

// rows BF16 [slots, HIDDEN], weights and slots [T, TOP_K] -> out BF16 [T, HIDDEN], summed in the order of the experts chosen, and
// then `added` BF16 [T, HIDDEN], if there is any
extern "C" __global__ void __launch_bounds__(THREADS)
moe_finalize(const uint4* __restrict__ rows, const float* __restrict__ weights, const int* __restrict__ slots,
             const uint4* __restrict__ added, uint4* __restrict__ out) {
  wait_for_inputs();
  const int token = blockIdx.x, piece = blockIdx.y * THREADS + threadIdx.x;
  if (piece >= PIECES) return;
  uint4 v[TOP_K];
  float weight[TOP_K], sums[8] = {};
#pragma unroll
  for (int i = 0; i < TOP_K; ++i) {
    const int slot = slots[token * TOP_K + i];
    weight[i] = slot < 0 ? 0.f : weights[token * TOP_K + i];
    v[i] = slot < 0 ? make_uint4(0, 0, 0, 0) : rows[(size_t)slot * PIECES + piece];
  }
#pragma unroll
  for (int i = 0; i < TOP_K; ++i) {
    const u32 words[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
#pragma unroll
    for (int w = 0; w < 4; ++w)
      sums[2 * w] += weight[i] * first_of(words[w]), sums[2 * w + 1] += weight[i] * second_of(words[w]);
  }
  u32 result[4];
#pragma unroll
  for (int w = 0; w < 4; ++w) result[w] = bf16_pair(sums[2 * w], sums[2 * w + 1]);
  const size_t place = (size_t)token * PIECES + piece;
  if (added) {
    const uint4 more = added[place];
    const u32 words[4] = {more.x, more.y, more.z, more.w};
#pragma unroll
    for (int w = 0; w < 4; ++w)
      result[w] = bf16_pair(first_of(result[w]) + first_of(words[w]), second_of(result[w]) + second_of(words[w]));
  }
  out[place] = make_uint4(result[0], result[1], result[2], result[3]);
}
