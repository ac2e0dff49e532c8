// The two passes of Adasum (Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021), for
// float16, bfloat16, float32 and float64. Instruction sets and rounding as in kernels.h: every variant gives the same
// bits.
#pragma once

#include <cstddef>

#include "base/dtype.h"

namespace horovod::kernels {

struct DotProducts {
  double ab = 0, aa = 0, bb = 0;
};

// The dot products of a with b and of each with itself, in double. The order of summation depends on count alone:
// element i joins running sum i mod 16, and the 16 sums are added pairwise at the end.
DotProducts dot_products(DType dtype, const void* a, const void* b, size_t count);

// output[i] = x * a[i] + y * b[i], where float64 computes in float64, and all others in float32 with x and y cast to
// it. output may be the same memory as a or b, but must not overlap otherwise.
void weighted_sum(DType dtype, void* output, const void* a, double x, const void* b, double y, size_t count);

}  // namespace horovod::kernels
