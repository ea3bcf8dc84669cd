// Which levels this processor can run.
#pragma once

#include <vector>

#include "kernels.h"

namespace native {

// The best first; never empty.
inline std::vector<const Kernels*> usable_levels() {
    std::vector<const Kernels*> levels;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512vbmi");
    if (avx512) levels.push_back(&avx512_kernels);
    if (__builtin_cpu_supports("avx2")) levels.push_back(&avx2_kernels);  // F16C is older than AVX2
#elif defined(__aarch64__)
    levels.push_back(&neon_kernels);  // part of the base instruction set
#endif
    levels.push_back(&scalar_kernels);
    return levels;
}

}  // namespace native
