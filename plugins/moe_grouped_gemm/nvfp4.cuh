// NVFP4 weights, BF16 activations: codes become BF16 in the registers from which the matrix instructions take their first operand.
//
// The order of columns within 256 is free as long as both operands have the same. Thread c = lane % 4 of a row owns columns 64 c ..
// 64 c + 63: four scales, and four 16-byte loads of two rows that no two threads of a phase take from the same banks. A word's
// codes j and j + 4 are 16 bits apart, so that two shifts and two masks make a pair of BF16 of them, 2^-126 times too small;
// the product with their scale times 2^110 is exact. Column k is at `place(k)` in the activations, which are written so.

constexpr float UNIT = 0x1p16f;  // what sums lack besides the expert's scale

// sum [64, N] += a [64, 16] * b [N, 16]^T, a in registers
#define PRODUCT(N, PLACES, SUMS, A, B) \
  __device__ __forceinline__ void product(float (&s)[N / 2], const u32 (&a)[4], u64 b) { \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" PLACES "}, {" A "}, " B ", 1, 1, 1, 0;" \
                 : SUMS : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)); \
  }
#if MOST > 8
PRODUCT(16, PLACES_8, SUMS_8(s, 0), "%8,%9,%10,%11", "%12")
PRODUCT(32, PLACES_16, SUMS_16(s, 0), "%16,%17,%18,%19", "%20")
PRODUCT(64, PLACES_32, SUMS_32(s, 0), "%32,%33,%34,%35", "%36")
#endif
#if MOST > 64
PRODUCT(128, PLACES_64, SUMS_64(s), "%64,%65,%66,%67", "%68")
#endif

__device__ __forceinline__ constexpr int place(int k) {
  return (k & ~255) + k / 8 % 8 * 32 + k % 4 * 8 + k / 64 % 4 * 2 + k / 4 % 2;
}

__device__ __forceinline__ u32 scaled(u32 word, int left, u32 scale) {
  const u32 signs = left < 0 ? word >> -left : word << left, sizes = left < 6 ? word >> 6 - left : word << left - 6;
  u32 out;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(signs & 0x80008000u | sizes & 0x01C001C0u), "r"(scale));
  return out;
}

// Four E4M3 codes -> each times 2^110 as a pair of the same BF16.
__device__ __forceinline__ void expand_scales(u32 (&out)[4], u32 codes) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    u32 halves;
    float value[2];
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((u16)(codes >> 16 * i)));
    asm("cvt.f32.f16 %0, %1;" : "=f"(value[0]) : "h"((u16)halves));
    asm("cvt.f32.f16 %0, %1;" : "=f"(value[1]) : "h"((u16)(halves >> 16)));
    for (int j = 0; j < 2; ++j) out[2 * i + j] = __byte_perm(__float_as_uint(value[j] * 0x1p110f), 0, 0x3232);
  }
}

// A word of each of two rows, 8 columns: first operands of two steps.
__device__ __forceinline__ void expand_words(u32 (&a)[2][4], u32 low, u32 high, u32 low_scale, u32 high_scale) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    a[j / 2][j % 2 * 2] = scaled(low, 12 - 4 * j, low_scale);
    a[j / 2][j % 2 * 2 + 1] = scaled(high, 12 - 4 * j, high_scale);
  }
}

__device__ __forceinline__ u32 word_of(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// One stage of one half: 16 steps, the products of two of them under way while the next two are expanded.
template <int N>
__device__ __forceinline__ void take_half(Shared& shared, int stage, int half, float (&sums)[N / 2]) {
  const int lane = threadIdx.x % 32, row = half * BLOCK + threadIdx.x / 32 * 16 + lane / 4;
  const u32* codes = (const u32*)shared.scales[stage] + row * 4 + lane % 4;
  const char* weights = shared.weights[stage] + row * 128;
  const u64 b = descriptor(shared_address(shared.rows[stage]), 16);
  u32 low_scale[4], high_scale[4], a[2][2][4];
  expand_scales(low_scale, codes[0]), expand_scales(high_scale, codes[8 * 4]);
#pragma unroll
  for (int piece = 0; piece < 2; ++piece) {
    const int chunk = (2 * (lane % 4) + piece ^ lane / 4) * 16;
    const uint4 low = *(const uint4*)(weights + chunk), high = *(const uint4*)(weights + 8 * 128 + chunk);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int scale = 2 * piece + i / 2, step = 8 * piece + 2 * i;
      expand_words(a[i % 2], word_of(low, i), word_of(high, i), low_scale[scale], high_scale[scale]);
      wgmma_begin();
#pragma unroll
      for (int j = 0; j < 2; ++j) product(sums, a[i % 2][j], b + (((step + j) / 4 * PANEL + (step + j) % 4 * 32) >> 4));
      wgmma_commit();
      wgmma_wait<1>();
    }
  }
}

__device__ __forceinline__ void mma(float (&s)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {" PLACES_4 "}, {%4,%5,%6,%7}, {%8,%9}, {" PLACES_4 "};"
      : FOUR(s, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Eight rows of activations, 32 columns: second operands of two steps.
__device__ __forceinline__ uint4 load_columns(u32 address) {
  uint4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
  return v;
}

// One stage of both halves for up to 8 rows: each warp multiplies by itself, and expands the next codes meanwhile. On an H200, gate
// and up of 32 experts take 147 to 151 us so (wgmma, a half at a time: 168); loads alone 131, all else without loads 134 to 139.
__device__ __forceinline__ void take_both(Shared& shared, int stage, float (&sums)[2][4]) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
  const u32 rows = shared_address(shared.rows[stage]) + lane % 8 * 128 + (lane / 8 ^ lane % 8) * 16;
  u32 scales[2][2][4];
  for (int half = 0; half < 2; ++half) {
    const u32* codes = (const u32*)shared.scales[stage] + (half * BLOCK + row) * 4 + lane % 4;
    expand_scales(scales[half][0], codes[0]), expand_scales(scales[half][1], codes[8 * 4]);
  }
#pragma unroll
  for (int piece = 0; piece < 2; ++piece) {
    uint4 low[2], high[2];
    for (int half = 0; half < 2; ++half) {
      const char* weights = shared.weights[stage] + (half * BLOCK + row) * 128 + (2 * (lane % 4) + piece ^ lane / 4) * 16;
      low[half] = *(const uint4*)weights, high[half] = *(const uint4*)(weights + 8 * 128);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int scale = 2 * piece + i / 2;
      const uint4 b = load_columns((rows ^ i % 2 * 64) + scale * PANEL);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        u32 a[2][4];
        expand_words(a, word_of(low[half], i), word_of(high[half], i), scales[half][0][scale], scales[half][1][scale]);
        mma(sums[half], a[0], b.x, b.y), mma(sums[half], a[1], b.z, b.w);
      }
    }
  }
}

struct Scales {
  const float* all;  // of experts
  float now;
  __device__ __forceinline__ void begin(const Item& item) { now = __ldg(all + item.expert) * UNIT; }
};

template <int N>
__device__ __forceinline__ void accumulate(Shared& shared, int steps, Scales& scales, Turn& turn, float (&sums)[2][N / 2]) {
#pragma unroll 1
  for (int step = 0; step < steps; ++step, turn.next()) {
    barrier_wait(&shared.full[turn.stage], turn.parity);
    if constexpr (N == 8) {
      take_both(shared, turn.stage, sums);
    } else {
      take_half<N>(shared, turn.stage, 0, sums[0]);
      take_half<N>(shared, turn.stage, 1, sums[1]);
      wgmma_wait<0>();
    }
    release(&shared.empty[turn.stage]);
  }
#pragma unroll
  for (int i = 0; i < N; ++i) sums[i / (N / 2)][i % (N / 2)] *= scales.now;
}

// One thread: a stage's codes and scales,
__device__ __forceinline__ void load_weights(Shared& shared, const Maps& maps, const Item& item, int step, int stage, int rank) {
  u64* full = &shared.full[stage];
  barrier_expect(full, 2 * HALF + PANELS * item.boxes() * BOX + sizeof(shared.scales[0]));
  for (int half = 0; half < 2; ++half) {
    copy_half(shared.weights[stage] + half * HALF, maps.weights, step * 128, item, half, rank, full);
    copy_half(shared.scales[stage] + half * BLOCK * 16, maps.scales, step * 16, item, half, rank, full);
  }
}

// and four panels of 64 columns of its activations.
__device__ __forceinline__ void load_rows(Shared& shared, const Maps& maps, const Item& item, int step, int stage, int rank) {
  for (int panel = 0; panel < PANELS; ++panel)
    copy_rows(shared.rows[stage] + panel * PANEL, maps, item, step * STEP + panel * 64, rank, &shared.full[stage]);
}

// silu(gate) * up as BF16 [slots, ROWS], columns in the order of the next product.
template <int N>
__device__ __forceinline__ void write_inner(Shared&, const Item& item, const float (&h)[N / 2], void* out, float*, int) {
  const int lane = threadIdx.x % 32, column = item.tile * BLOCK + threadIdx.x / 32 * 16 + lane % 4 * 2;
#pragma unroll
  for (int j = 0; j < N / 8; ++j)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const u32 pair = transposed(bf16_pair(h[4 * j + 2 * i], h[4 * j + 2 * i + 1]));
      const int row = 8 * j + lane / 4;
      if (row >= item.written()) continue;
      u16* to = (u16*)out + (size_t)(item.slot + row) * ROWS;
      to[place(column + 8 * i)] = (u16)pair, to[place(column + 8 * i + 1)] = (u16)(pair >> 16);
    }
}
