// What the CPU and the operating system below us can run.
#pragma once

namespace horovod::kernels {

struct CpuFeatures {
  bool avx2 = false;    // AVX2 and F16C, and the system saves the 256-bit registers
  bool avx512 = false;  // AVX-512 F, BW, DQ and VL, and the system saves the 512-bit registers
};

CpuFeatures cpu_features();

}  // namespace horovod::kernels
