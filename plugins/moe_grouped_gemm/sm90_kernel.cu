// Grouped products of R1's experts on Hopper, for few rows an expert: weights are the matrix instructions' first operand.
//
// A CTA has 256 rows of an expert's weights (SWIGLU: 128 of gate and the same 128 of up, else 256 of down) against up to MOST
// rows of activations, padded to 8, 16, 32, 64, 96 or 128, whichever suffices. A warp keeps a ring of stages full, 128 bytes of
// each weight row a stage, with the copy engine; two warpgroups take 64 rows of both halves each, so that a thread has gate
// and up of the same element: silu(gate) * up is quantised and written without a trip to memory. CTAs stay; the work they share is
// what `moe_permute` found: experts without rows cost nothing. While sums are written, loads for the next work go on. For up to 8
// rows an expert there may be CTAs without work: they share the columns of the others', and the last of them to be done adds up.
//
// Time is that of reading the weights, with few rows: 64 to 192 KB are on their way to every multiprocessor. Compiled by NVRTC for
// sm_90a: NVFP4 (weights; else FP8 in blocks), SWIGLU, COLUMNS (of a weight row), ROWS (columns of the result), MOST, CTAS (of a
// cluster), RESIDENT (CTAs of a multiprocessor), STAGES.

#include "../numerics.cuh"
#include "../wgmma.cuh"

constexpr int CONSUMERS = 256, THREADS = CONSUMERS + 128;

#include "work.cuh"
#include "pair.cuh"
#include "join.cuh"
#if NVFP4
#include "nvfp4.cuh"
#else
#include "fp8.cuh"
#endif

// Of the 3 * 168 that CTAs begin with, or 3 * 80.
constexpr int PRODUCER_REGISTERS = RESIDENT > 1 ? 32 : SHARES ? 40 : 24;
constexpr int CONSUMER_REGISTERS = RESIDENT > 1 ? 104 : SHARES ? 232 : 240;

struct Result {
  void* rows;     // SWIGLU: FP8 codes or BF16 [slots, ROWS] for the next product, else BF16 [slots, ROWS]
  float* scales;  // of the codes [ROWS / 128, stride]
  int stride;
};

__device__ __forceinline__ float silu(float value) { return __fdividef(value, 1.f + exp2_fast(value * -1.442695041f)); }

// Sums of both halves as BF16 rows, 8 columns of one to a lane.
template <int N>
__device__ __forceinline__ void write_outer(const Item& item, const float (&sums)[2][N / 2], const Result& result) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int column = (2 * item.tile + half) * BLOCK + threadIdx.x / 32 * 16 + lane % 2 * 8;
#pragma unroll
    for (int j = 0; j < N / 4; j += 4) {
      u32 words[4] = {};
#pragma unroll
      for (int i = j; i < j + 4 && i < N / 4; ++i) words[i - j] = transposed(bf16_pair(sums[half][2 * i], sums[half][2 * i + 1]));
      transpose(words);
      const int row = 4 * j + lane % 4 / 2 * 8 + lane / 4;
      if (row < item.rows && column < ROWS)
        *(uint4*)((u16*)result.rows + (size_t)(item.slot + row) * ROWS + column) =
            make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

// The scales of what comes after `item` are on their way while its sums are written.
template <int N>
__device__ __forceinline__ void work_on(Shared& shared, const Item& item, const Place& next, Scales& scales, Turn& turn,
                                        const Sharers& sharers, const Result& result) {
  float sums[2][N / 2] = {};
  accumulate<N>(shared, item.steps(), scales, turn, sums);
  scales.begin(next.item());
  if constexpr (SHARES) {
    if (!sharers.join(shared.arrived, sums)) return;
  }
  if constexpr (SWIGLU) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) sums[0][i] = silu(sums[0][i]) * sums[1][i];
    write_inner<N>(shared, item, sums[0], result.rows, result.scales, result.stride);
  } else {
    write_outer<N>(item, sums, result);
  }
}

__device__ __forceinline__ void consume(Shared& shared, const Work& work, const float* more_scales, float4* parts, int* arrivals,
                                        const Result& result) {
  const int rank = cluster_rank(), clusters = gridDim.x / CTAS;
  int index = blockIdx.x / CTAS;
  if (index >= work.count) return;
  Turn turn;
  Place place(work, index, rank);
  Scales scales{more_scales};
  scales.begin(place.item());
#pragma unroll 1
  for (; index < work.count; index += clusters) {
    const Item item = place.item();
    const Sharers sharers{parts, arrivals + place.index * CTAS + rank, place.share, place.sharers};
    place = Place(work, index + clusters < work.count ? index + clusters : index, rank);
    if (item.rows <= 8) work_on<8>(shared, item, place, scales, turn, sharers, result);
#if MOST > 8
    else if (item.rows <= 16) work_on<16>(shared, item, place, scales, turn, sharers, result);
    else if (item.rows <= 32) work_on<32>(shared, item, place, scales, turn, sharers, result);
    else if (item.rows <= 64) work_on<64>(shared, item, place, scales, turn, sharers, result);
#endif
#if MOST > 64
#if !NVFP4
    else if (item.rows <= 96) work_on<96>(shared, item, place, scales, turn, sharers, result);
#endif
    else work_on<128>(shared, item, place, scales, turn, sharers, result);
#endif
  }
}

// The first stages' weights do not wait for the kernel before this one, which makes the activations.
__device__ __forceinline__ void produce(Shared& shared, const Maps& maps, const Work& work) {
  Turn turn;
  const int rank = cluster_rank();
  bool early = true;
#pragma unroll 1
  for (int index = blockIdx.x / CTAS; index < work.count; index += gridDim.x / CTAS) {
    const Item item = Place(work, index, rank).item();
    if (early) {
      for (int step = 0; step < EARLY && step < item.steps(); ++step)
        load_weights(shared, maps, item, item.first() + step, step, rank);
      wait_before_next();
    }
#pragma unroll 1
    for (int step = 0; step < item.steps(); ++step, turn.next()) {
      if (!early || step >= EARLY) {
        barrier_wait(&shared.empty[turn.stage], turn.parity ^ 1);
        load_weights(shared, maps, item, item.first() + step, turn.stage, rank);
      }
      load_rows(shared, maps, item, item.first() + step, turn.stage, rank);
    }
    early = false;
  }
}

// weights [E * HEIGHT, bytes], rows [slots, COLUMNS]; `scales`, `more_scales`: FP8, of rows [COLUMNS / 128, slots], and F32 of
// weights [E * HEIGHT / 128, COLUMNS / 128]; NVFP4: of weights, E4M3 [E * HEIGHT, COLUMNS / 16], and F32 of experts [E]; SHARES:
// parts [CTAs * 2 * CONSUMERS], and arrivals [CTAs], which are 0 before and after
extern "C" __global__ void __cluster_dims__(CTAS, 1, 1) __launch_bounds__(THREADS, RESIDENT)
moe_product(const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap rows,
            const __grid_constant__ TensorMap more_rows, const __grid_constant__ TensorMap scales,
            const float* __restrict__ more_scales, const int4* __restrict__ work, void* __restrict__ out,
            float* __restrict__ out_scales, int stride, float4* parts, int* arrivals) {
  extern __shared__ char memory[];
  Shared& shared = *(Shared*)(memory + (-shared_address(memory) & 1023));
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i)
      barrier_init(&shared.full[i], 1), barrier_init(&shared.empty[i], CTAS * CONSUMERS / 32);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (CTAS > 1) cluster_meet();
  if (__shfl_sync(~0u, threadIdx.x / 128, 0) == CONSUMERS / 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(PRODUCER_REGISTERS));
    if (threadIdx.x == CONSUMERS) produce(shared, Maps{&weights, &rows, &more_rows, &scales}, Work(work));
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(CONSUMER_REGISTERS));
    wait_before_next();
    consume(shared, Work(work), more_scales, parts, arrivals, Result{out, out_scales, stride});
  }
  if (CTAS > 1) cluster_meet();  // none ends while the other still writes to it
}
