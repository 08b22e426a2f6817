// Chooses the variant of the hot loops for this machine.

#include "core.hpp"

#include <cstdlib>
#include <cstring>
#include <initializer_list>

namespace laconic {

extern const Simd simd_baseline;
#if defined(__x86_64__)
extern const Simd simd_avx2;
extern const Simd simd_avx512;
#endif

const Simd* simd_named(const char* name) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512cd");
  if (avx512 && !std::strcmp(name, "avx512")) return &simd_avx512;
  if (avx2 && !std::strcmp(name, "avx2")) return &simd_avx2;
#endif
  return std::strcmp(name, "baseline") ? nullptr : &simd_baseline;
}

const Simd& simd() {
  static const Simd& chosen = []() -> const Simd& {
    // For tests and comparisons. A variant that this machine cannot run is ignored.
    if (const char* wanted = std::getenv("LACONIC_ISA")) {
      if (const Simd* named = simd_named(wanted)) return *named;
    }
    for (const char* name : {"avx512", "avx2"}) {
      if (const Simd* best = simd_named(name)) return *best;
    }
    return simd_baseline;
  }();
  return chosen;
}

}  // namespace laconic
