#include "simd_avx512.h"
#include "level.h"

const native::Kernels native::avx512_kernels = NATIVE_KERNELS("avx512");
