#include "simd_avx2.h"
#include "level.h"

const native::Kernels native::avx2_kernels = NATIVE_KERNELS("avx2");
