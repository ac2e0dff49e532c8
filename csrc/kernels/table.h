// One table of function pointers per instruction set, indexed by element type and operation. The tables are plain
// constant data, so that naming one never runs code which the CPU may lack.
#pragma once

#include <cstddef>

#include "base/dtype.h"
#include "base/reduce_op.h"
#include "kernels/adasum.h"

namespace horovod::kernels {

// The contract is reduce() of kernels.h, for two inputs or more; but integers leave postscale to a call of their
// ScaleFunction.
using ReduceFunction = void (*)(void* output, const void* const* inputs, int input_count, size_t count,
                                double postscale);
using ScaleFunction = void (*)(void* output, const void* input, size_t count, double factor);

// As adasum.h says.
using DotFunction = DotProducts (*)(const void* a, const void* b, size_t count);
using WeightedSumFunction = void (*)(void* output, const void* a, double x, const void* b, double y, size_t count);

struct Table {
  const char* isa = nullptr;
  ReduceFunction reduce[kDTypeCount][kReduceOpCount] = {};  // null where check_reduction() refuses
  ScaleFunction scale[kDTypeCount] = {};                    // null for boolean, which has no factor
  DotFunction dot_products[kDTypeCount] = {};               // floating-point types only, as the next
  WeightedSumFunction weighted_sum[kDTypeCount] = {};
};

// The variant in use.
const Table& current_table();

extern const Table* const kPortableTable;
extern const Table* const kAvx2Table;    // null when this build has no such variant
extern const Table* const kAvx512Table;  // likewise

}  // namespace horovod::kernels
