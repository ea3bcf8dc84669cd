#include "simd_neon.h"
#include "level.h"

const native::Kernels native::neon_kernels = NATIVE_KERNELS("neon");
