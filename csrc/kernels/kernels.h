// Element-wise arithmetic on plain memory. The instruction set is chosen once at run time (see isa()); every variant
// gives the same bits, so ranks on different CPUs agree.
#pragma once

#include <cstddef>

#include "base/dtype.h"
#include "base/reduce_op.h"
#include "base/status.h"

namespace horovod::kernels {

// Why `op` can't be applied to `dtype` (for example Average of bool), or ok.
Status check_reduction(DType dtype, ReduceOp op);

// output[i] = postscale * (inputs[0][i] op inputs[1][i] op ... op inputs[input_count - 1][i]), strictly left to right.
//
// op is sum, min, max or product (average is sum with postscale 1/n, chosen by the caller; adasum is not element-wise).
// float16, bfloat16 and the float8 types are computed in float32 and rounded once at the end, to nearest even. float32
// and float64 are computed in their own type, with postscale cast to it. Integers wrap; a postscale other than 1 is
// applied as double and truncated toward zero. boolean: sum and max are OR, product and min are AND; postscale is
// ignored. output may be the same memory as any one of the inputs, but must not overlap otherwise. Any alignment.
//
// Where the operation leaves a choice: a NaN in any input gives NaN, of min and max too, and always the one positive
// quiet NaN without a payload; a scaled integer that does not fit becomes the nearest one that does (NaN becomes 0);
// min and max of zeros with different sign keep the later one (float16 and bfloat16: -0 < +0). A single input is copied
// as it is.
void reduce(DType dtype, ReduceOp op, void* output, const void* const* inputs, int input_count, size_t count,
            double postscale);

// output[i] = factor * input[i] with the rounding rules above. output may equal input.
void scale(DType dtype, void* output, const void* input, size_t count, double factor);

// "portable", "avx2" or "avx512": what this CPU gets.
const char* isa();

// For tests and benchmarks: use the named variant from now on. False when this CPU or this build lacks it.
bool force_isa(const char* name);

}  // namespace horovod::kernels
