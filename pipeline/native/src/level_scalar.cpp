#include "simd_scalar.h"
#include "level.h"

const native::Kernels native::scalar_kernels = NATIVE_KERNELS("scalar");
