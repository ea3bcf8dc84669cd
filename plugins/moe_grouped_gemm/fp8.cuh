// FP8 in blocks: products of 128 columns, then their sums times both scales into float32.

#define COMMA ,
// sum [64, N] = (or +=) a [64, 32] * b [N, 32]^T, both in shared memory
#define PRODUCT(N, PLACES, SUMS, A, B, ADD) \
  __device__ __forceinline__ void product(float (&s)[N / 2], u64 a, u64 b, int add) { \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, " ADD ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" \
                 PLACES "}, " A ", " B ", p, 1, 1; }" : SUMS : "l"(a), "l"(b), "r"(add)); \
  }
PRODUCT(8, PLACES_4, FOUR(s, 0), "%4", "%5", "%6")
#if MOST > 8
PRODUCT(16, PLACES_8, SUMS_8(s, 0), "%8", "%9", "%10")
PRODUCT(32, PLACES_16, SUMS_16(s, 0), "%16", "%17", "%18")
PRODUCT(64, PLACES_32, SUMS_32(s, 0), "%32", "%33", "%34")
#define PLACES_48 PLACES_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
PRODUCT(96, PLACES_48, SUMS_32(s, 0) COMMA SUMS_16(s, 32), "%48", "%49", "%50")
PRODUCT(128, PLACES_64, SUMS_64(s), "%64", "%65", "%66")
#endif

constexpr int SCALES = 1;  // the number of a barrier

// Scales of both halves' weights along the columns, 32 of them one a lane, the next 32 loaded well before they are needed.
struct Scales {
  const float *all, *blocks[2];
  float now[2], later[2];
  int steps;  // of the item
  __device__ __forceinline__ void load(float (&to)[2], int step) const {
    for (int half = 0; half < 2; ++half) to[half] = __ldg(blocks[half] + min(step + (int)threadIdx.x % 32, steps - 1));
  }
  __device__ __forceinline__ void begin(const Item& item) {
    steps = item.steps();
    for (int half = 0; half < 2; ++half) {
      const int row = min(item.weight_row(half), (item.expert + 1) * HEIGHT - BLOCK);
      blocks[half] = all + (size_t)(row / BLOCK) * STEPS + item.first();
    }
    load(now, 0);
  }
  __device__ __forceinline__ void reach(int step) {
    if (step % 32 == 8 && step + 24 < steps) load(later, step + 24);
    if (step % 32 == 0 && step) now[0] = later[0], now[1] = later[1];
  }
};

template <int N>
__device__ __forceinline__ void multiply(float (&part)[N / 2], u64 a, u64 b) {
#pragma unroll
  for (int k = 0; k < 4; ++k) product(part, a + (k * 32 >> 4), b + (k * 32 >> 4), k > 0);
  wgmma_commit();
}

template <int N>
__device__ __forceinline__ void promote(float (&sums)[N / 2], const float (&part)[N / 2], const float* scales, float scale) {
#pragma unroll
  for (int j = 0; j < N / 8; ++j) {
    const float2 v = *(const float2*)(scales + 8 * j + threadIdx.x % 4 * 2);
    const float first = v.x * scale, second = v.y * scale;
    sums[4 * j] += part[4 * j] * first, sums[4 * j + 1] += part[4 * j + 1] * second;
    sums[4 * j + 2] += part[4 * j + 2] * first, sums[4 * j + 3] += part[4 * j + 3] * second;
  }
}

// One stage: this warpgroup's 64 rows of both halves. Up to 64 columns the second half's products run while the first is promoted.
template <int N>
__device__ __forceinline__ void take_stage(Shared& shared, int stage, float (&sums)[2][N / 2], float first, float second) {
  const u64 a = descriptor(shared_address(shared.weights[stage]) + threadIdx.x / 128 * (HALF / 2), 16);
  const u64 b = descriptor(shared_address(shared.rows[stage]), 16);
  const float* scales = shared.scales[stage];
  if constexpr (N <= 64) {
    float part[2][N / 2];
    wgmma_begin();
    multiply<N>(part[0], a, b);
    multiply<N>(part[1], a + (HALF >> 4), b);
    wgmma_wait<1>();
    promote<N>(sums[0], part[0], scales, first);
    wgmma_wait<0>();
    promote<N>(sums[1], part[1], scales, second);
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float part[N / 2];
      wgmma_begin();
      multiply<N>(part, a + (half * HALF >> 4), b);
      wgmma_wait<0>();
      promote<N>(sums[half], part, scales, half ? second : first);
    }
  }
}

template <int N>
__device__ __forceinline__ void accumulate(Shared& shared, int steps, Scales& scales, Turn& turn, float (&sums)[2][N / 2]) {
#pragma unroll 1
  for (int step = 0; step < steps; ++step, turn.next()) {
    scales.reach(step);
    const float first = __shfl_sync(~0u, scales.now[0], step % 32), second = __shfl_sync(~0u, scales.now[1], step % 32);
    barrier_wait(&shared.full[turn.stage], turn.parity);
    take_stage<N>(shared, turn.stage, sums, first, second);
    release(&shared.empty[turn.stage]);
  }
}

// One thread: a stage's weights,
__device__ __forceinline__ void load_weights(Shared& shared, const Maps& maps, const Item& item, int step, int stage, int rank) {
  u64* full = &shared.full[stage];
  barrier_expect(full, 2 * HALF + item.boxes() * BOX + sizeof(shared.scales[0]));
  for (int half = 0; half < 2; ++half)
    copy_half(shared.weights[stage] + half * HALF, maps.weights, step * STEP, item, half, rank, full);
}

// and its activations and their scales.
__device__ __forceinline__ void load_rows(Shared& shared, const Maps& maps, const Item& item, int step, int stage, int rank) {
  u64* full = &shared.full[stage];
  copy_rows(shared.rows[stage], maps, item, step * STEP, rank, full);
  copy_tile(shared_address(shared.scales[stage]), maps.scales, item.slot, step, full);
}

// Largest magnitudes of the tile's columns, over both warpgroups, into inverses; the scales are written.
template <int N>
__device__ __forceinline__ void scale_columns(Shared& shared, const Item& item, const float (&h)[N / 2], float* out_scales,
                                              int stride) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < N / 4; ++i) {
    float top = fmaxf(fabsf(h[i / 2 * 4 + i % 2]), fabsf(h[i / 2 * 4 + i % 2 + 2]));
    for (int distance = 4; distance < 32; distance *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, distance));
    if (lane < 4) shared.tops[threadIdx.x / 32][i / 2 * 8 + 2 * lane + i % 2] = top;
  }
  rendezvous(SCALES, CONSUMERS);
  if (threadIdx.x < N) {
    float top = __uint_as_float(LEAST_AMAX << 16);
    for (int warp = 0; warp < CONSUMERS / 32; ++warp) top = fmaxf(top, shared.tops[warp][threadIdx.x]);
    shared.inverse[threadIdx.x] = __fdiv_rn(448.f, top);
    if ((int)threadIdx.x < item.written()) out_scales[(size_t)item.tile * stride + item.slot + threadIdx.x] = __fdiv_rn(top, 448.f);
  }
  rendezvous(SCALES, CONSUMERS);
}

// silu(gate) * up as codes [slots, ROWS]: transposed in pairs of rows g and g + 8, then 16 columns of a row to a lane.
template <int N>
__device__ __forceinline__ void write_inner(Shared& shared, const Item& item, const float (&h)[N / 2], void* out, float* out_scales,
                                            int stride) {
  scale_columns<N>(shared, item, h, out_scales, stride);
  const int lane = threadIdx.x % 32, column = item.tile * BLOCK + threadIdx.x / 32 * 16;
#pragma unroll
  for (int j = 0; j < N / 8; j += 4) {
    u32 words[4] = {};
#pragma unroll
    for (int i = j; i < j + 4 && i < N / 8; ++i) {
      const float2 inverse = *(const float2*)(shared.inverse + 8 * i + lane % 4 * 2);
      const u32 first = e4m3_pair(h[4 * i] * inverse.x, h[4 * i + 2] * inverse.x);
      const u32 second = e4m3_pair(h[4 * i + 1] * inverse.y, h[4 * i + 3] * inverse.y);
      words[i - j] = transposed(first | second << 16);
    }
    transpose(words);
    const int row = 8 * (j + lane % 4) + lane / 4;
    if (row < item.written())
      *(uint4*)((u8*)out + (size_t)(item.slot + row) * ROWS + column) =
          make_uint4(__byte_perm(words[0], words[1], 0x6420), __byte_perm(words[2], words[3], 0x6420),
                     __byte_perm(words[0], words[1], 0x7531), __byte_perm(words[2], words[3], 0x7531));
  }
}
