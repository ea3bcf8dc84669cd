// Runs a CUDA kernel on the CPU, thread by thread: each CUDA thread is a fiber that yields at barriers and warp exchanges.
// Slow and exact: it is there to hold the very source that NVRTC compiles to its reference, on machines without a GPU.
// Kernels must be warp-synchronous in the plain way: full masks, and every thread of a warp or block meets each exchange,
// except threads that have returned. Sources keep inline PTX behind `#ifdef __CUDA_ARCH__`.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#define __global__
#define __device__
#define __constant__ static
#define __shared__ static
#define __launch_bounds__(...)
#define __forceinline__ inline
#define __noinline__ inline
#define __restrict__

static inline uint32_t max(uint32_t a, uint32_t b) { return a < b ? b : a; }
using std::max;
using std::min;
struct dim3_ { int x = 1, y = 1, z = 1; };
struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) int4 { int x, y, z, w; };
static inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

static dim3_ threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {
struct Fiber { ucontext_t context; std::vector<char> stack; bool alive; };
static std::vector<Fiber> fibers;
static ucontext_t scheduler;
static int current;
static std::function<void()> body;
static std::vector<uint32_t> slots;

static int arrived, alive, barrier;

static void yield() { swapcontext(&fibers[current].context, &scheduler); }
static void enter() {
  body();
  fibers[current].alive = false;
  --alive;
  swapcontext(&fibers[current].context, &scheduler);
}
static void sync() {
  const int mine = barrier;
  ++arrived;
  for (yield(); mine == barrier; yield())
    if (arrived == alive) ++barrier, arrived = 0;
}
// Two rounds of the scheduler: all threads have deposited, then all have read. Threads run in order within a round.
static uint32_t* exchange(uint32_t value) {
  slots[current] = value;
  yield();
  return slots.data() + current / 32 * 32;
}
static void run_block(int threads) {
  fibers.resize(threads);
  slots.assign((threads + 31) / 32 * 32, 0);
  for (auto& fiber : fibers) {
    fiber.alive = true;
    fiber.stack.resize(1 << 16);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = &scheduler;
    makecontext(&fiber.context, enter, 0);
  }
  alive = threads;
  arrived = 0;
  for (bool any = true; any;) {
    any = false;
    for (current = 0; current < threads; ++current) {
      if (!fibers[current].alive) continue;
      any = true;
      threadIdx.x = current;
      swapcontext(&scheduler, &fibers[current].context);
    }
  }
}
static void launch(dim3_ grid, int threads, std::function<void()> kernel) {
  body = kernel;
  gridDim = grid;
  blockDim.x = threads;
  for (blockIdx.z = 0; blockIdx.z < grid.z; ++blockIdx.z)
    for (blockIdx.y = 0; blockIdx.y < grid.y; ++blockIdx.y)
      for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x) run_block(threads);
}
template <class Combine>
static uint32_t over_warp(uint32_t value, Combine combine) {
  const uint32_t* all = exchange(value);
  uint32_t out = all[0];
  for (int i = 1; i < 32; ++i) out = combine(out, all[i]);
  yield();
  return out;
}
template <class T>
static T from_lane(T value, int lane) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint32_t got = exchange(bits)[lane & 31];
  yield();
  std::memcpy(&value, &got, 4);
  return value;
}
}  // namespace emulator

static inline void __syncthreads() { emulator::sync(); }
static inline void __syncwarp() { emulator::yield(); }
static inline uint32_t __reduce_max_sync(unsigned, uint32_t v) {
  return emulator::over_warp(v, [](uint32_t a, uint32_t b) { return std::max(a, b); });
}
static inline uint32_t __reduce_add_sync(unsigned, uint32_t v) {
  return emulator::over_warp(v, [](uint32_t a, uint32_t b) { return a + b; });
}
static inline uint32_t __ballot_sync(unsigned, bool v) {
  return emulator::over_warp(v ? 1u << (threadIdx.x & 31) : 0u, [](uint32_t a, uint32_t b) { return a | b; });
}
template <class T> static inline T __shfl_sync(unsigned, T v, int lane) { return emulator::from_lane(v, lane); }
template <class T> static inline T __shfl_xor_sync(unsigned, T v, int mask) {
  return emulator::from_lane(v, (threadIdx.x & 31) ^ mask);
}
// The GPU's arithmetic gives one NaN, 0x7fffffff, whatever the operands'.
static inline uint32_t __float_as_uint(float v) { if (v != v) return 0x7FFFFFFFu; uint32_t b; std::memcpy(&b, &v, 4); return b; }
static inline float __uint_as_float(uint32_t b) { float v; std::memcpy(&v, &b, 4); return v; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fdividef(float a, float b) { return a / b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __saturatef(float v) { return v > 0.f ? std::min(v, 1.f) : 0.f; }  // of NaN, 0
static inline float rsqrtf(float v) { return 1.f / std::sqrt(v); }
#define __expf(v) std::exp((float)(v))  // glibc has the name
static inline int __float2int_rn(float v) { return (int)std::nearbyint(v); }
static inline float __double2float_ru(double v) { float f = (float)v; return f < v ? std::nextafter(f, INFINITY) : f; }
static inline float __double2float_rd(double v) { float f = (float)v; return f > v ? std::nextafter(f, -INFINITY) : f; }
static inline int __ffs(uint32_t v) { return __builtin_ffs((int)v); }
static inline int __popc(uint32_t v) { return __builtin_popcount(v); }
static inline int atomicAdd(int* p, int v) { const int before = *p; *p += v; return before; }
static inline void atomicMax(uint32_t* p, uint32_t v) { *p = std::max(*p, v); }
static inline uint32_t __vmaxu2(uint32_t a, uint32_t b) {
  return std::max(a >> 16, b >> 16) << 16 | std::max(a & 0xFFFFu, b & 0xFFFFu);
}
static inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = (uint64_t)b << 32 | a;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) out |= (uint32_t)(bytes >> (8 * (selector >> (4 * i) & 7)) & 0xFF) << (8 * i);
  return out;
}
