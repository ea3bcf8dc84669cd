// Hopper's matrix and copy instructions in the shapes that kernels here use. Accumulators are one warpgroup's: row g = lane / 4
// of a warp's 16, or g + 8; element 4 j + i is column 8 j + 2 (lane % 4) + i % 2 of row g + 8 (i / 2).

typedef unsigned long long u64;

// What is multiplied: BF16, or FP16 where the including source says so. Sums are float32.
#ifndef OPERANDS
#define OPERANDS "bf16.bf16"
#endif

struct alignas(64) TensorMap { char bytes[128]; };

__device__ __forceinline__ u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

// A tile in shared memory: rows of 128 bytes, 16-byte pieces swizzled by row % 8, tiles of 64 rows. `leading`: bytes from one
// 64-column tile to the next, for operands that are read along columns.
__device__ __forceinline__ u64 descriptor(u32 address, u32 leading) {
  return (u64)(address >> 4) | (u64)(leading >> 4) << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62;
}

__device__ __forceinline__ void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(PENDING) : "memory"); }

// Operands of a thread's 4 to 128 sums: their places in the instruction, and the registers.
#define PLACES_4 "%0,%1,%2,%3"
#define PLACES_8 PLACES_4 ",%4,%5,%6,%7"
#define PLACES_16 PLACES_8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define PLACES_32 PLACES_16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define PLACES_64 PLACES_32 "," \
  "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47," \
  "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define PLACES_128 PLACES_64 "," \
  "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79," \
  "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95," \
  "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111," \
  "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define FOUR(s, i) "+f"(s[i]), "+f"(s[i + 1]), "+f"(s[i + 2]), "+f"(s[i + 3])
#define SUMS_8(s, i) FOUR(s, i), FOUR(s, i + 4)
#define SUMS_16(s, i) SUMS_8(s, i), SUMS_8(s, i + 8)
#define SUMS_32(s, i) SUMS_16(s, i), SUMS_16(s, i + 16)
#define SUMS_64(s) SUMS_32(s, 0), SUMS_32(s, 32)
#define SUMS_128(s) SUMS_64(s), SUMS_32(s, 64), SUMS_32(s, 96)

// sum [64, 64] = (or +=) a [64, 16] * b [64, 16]^T, both in shared memory, rows along the inner axis
__device__ __forceinline__ void wgmma_64(float (&s)[32], u64 a, u64 b, int add) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %34, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." OPERANDS " {" PLACES_32
      "}, %32, %33, p, 1, 1, 0, 0; }"
      : SUMS_32(s, 0) : "l"(a), "l"(b), "r"(add));
}

// sum [64, 128] = (or +=) a [64, 16] * b [128, 16]^T
__device__ __forceinline__ void wgmma_128(float (&s)[64], u64 a, u64 b, int add) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %66, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32." OPERANDS " {" PLACES_64
      "}, %64, %65, p, 1, 1, 0, 0; }"
      : SUMS_64(s) : "l"(a), "l"(b), "r"(add));
}

// sum [64, 128] += a [64, 16] * b [16, 128], b along columns; a in registers
__device__ __forceinline__ void wgmma_128(float (&o)[64], const u32 (&a)[4], u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." OPERANDS " {" PLACES_64 "}, {%64,%65,%66,%67}, %68, 1, 1, 1, 1;"
      : SUMS_64(o) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// sum [64, 256] += a [64, 16] * b [16, 256], b along columns; a in registers
__device__ __forceinline__ void wgmma_256(float (&o)[128], const u32 (&a)[4], u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n256k16.f32." OPERANDS " {" PLACES_128 "}, {%128,%129,%130,%131}, %132, 1, 1, 1, 1;"
      : SUMS_128(o) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// the same, a in shared memory, rows along the inner axis
__device__ __forceinline__ void wgmma_256(float (&o)[128], u64 a, u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n256k16.f32." OPERANDS " {" PLACES_128 "}, %128, %129, 1, 1, 1, 0, 1;"
      : SUMS_128(o) : "l"(a), "l"(b));
}

__device__ __forceinline__ void barrier_init(u64* barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u64* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void barrier_expect(u64* barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(shared_address(barrier)), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_wait(u64* barrier, u32 parity) {
  asm volatile(
      "{ .reg .pred done; again%=: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @!done bra again%=; }"
      :: "r"(shared_address(barrier)), "r"(parity) : "memory");
}

// 64 columns of a matrix, as many rows as its map says, into a swizzled tile, completing on `barrier`
__device__ __forceinline__ void copy_tile(u32 tile, const TensorMap* map, int column, int row, u64* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
      :: "r"(tile), "l"((u64)map), "r"(column), "r"(row), "r"(shared_address(barrier)) : "memory");
}

// Its description, ahead of the first copy.
__device__ __forceinline__ void fetch(const TensorMap* map) { asm volatile("prefetch.tensormap [%0];" :: "l"((u64)map) : "memory"); }

// What ordinary stores wrote to shared memory becomes visible to matrix and copy instructions.
__device__ __forceinline__ void publish() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// A barrier of `threads` of the block; `announce` is one that does not wait for the others.
__device__ __forceinline__ void announce(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" :: "r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void rendezvous(int id, int threads) {
  asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ float exp2_fast(float value) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

// Four words of each of four lanes, word i of lane l -> word l of lane i.
__device__ __forceinline__ void transpose(u32 (&a)[4]) {
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2) {
    const bool upper = threadIdx.x & bit;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      const u32 other = __shfl_xor_sync(~0u, upper ? a[i] : a[i + bit], bit);
      if (upper) a[i] = other;
      else a[i + bit] = other;
    }
  }
}

// Row g + 8 `half` of a warpgroup's sums, times `factor`, to memory in BF16, 16 bytes a lane; `there`: whether to write it.
template <int N>
__device__ __forceinline__ void store_row(const float (&o)[N], int half, float factor, u16* row, bool there) {
#pragma unroll
  for (int j = 0; j < N / 4; j += 4) {
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int element = 4 * (j + i) + 2 * half;
      words[i] = bf16_pair(o[element] * factor, o[element + 1] * factor);
    }
    transpose(words);
    if (there) *(uint4*)(row + (j + threadIdx.x % 4) * 8) = make_uint4(words[0], words[1], words[2], words[3]);
  }
}
