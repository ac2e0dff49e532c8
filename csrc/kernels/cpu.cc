#include "kernels/cpu.h"

#if defined(__x86_64__)

#include <cpuid.h>

namespace horovod::kernels {
namespace {

constexpr bool bit(unsigned word, int index) { return (word >> index) & 1; }

// XCR0: which register state the system saves when it switches threads (Intel SDM volume 1, section 13.3).
unsigned saved_state() {
  unsigned low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

}  // namespace

CpuFeatures cpu_features() {
  CpuFeatures features;
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return features;
  const bool osxsave = bit(ecx, 27), avx = bit(ecx, 28), f16c = bit(ecx, 29), fma = bit(ecx, 12);
  if (!osxsave || !avx) return features;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return features;
  constexpr unsigned ymm = 0x06, zmm = 0xe6;
  const unsigned saved = saved_state();
  features.avx2 = bit(ebx, 5) && f16c && fma && (saved & ymm) == ymm;
  features.avx512 =
      features.avx2 && bit(ebx, 16) && bit(ebx, 17) && bit(ebx, 30) && bit(ebx, 31) && (saved & zmm) == zmm;
  return features;
}

}  // namespace horovod::kernels

#else

namespace horovod::kernels {
CpuFeatures cpu_features() { return {}; }
}  // namespace horovod::kernels

#endif
