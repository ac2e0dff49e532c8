// How NCCL computes our reductions. It multiplies by a factor only before it adds up, in the tensor's own type; so the
// factors of a sum become one, and those of Min, Max and Product are applied by a communicator of one rank, before and
// after. The bits may differ from those of the CPU, which rounds once at the end (docs/algorithms.md).
#pragma once

#include <cstdint>

#include "backends/nccl/library.h"
#include "collectives/batch.h"

namespace horovod::nccl {

struct Factor {
  double value = 1.0;
  uint64_t bits = 0;  // the value as one element of the type

  bool needed() const { return value != 1.0; }
};

struct ReductionPlan {
  DataType type = kFloat32;
  int op = kSum;         // NCCL's operator, if `premul` is not needed
  Factor premul;         // sums only: multiplies each member's values
  Factor before, after;  // for others: multiply the input and the result, in steps of their own
};

// The plan for tensors of `dtype` under the operation's reduction and factors; an error says what NCCL can't do, as a
// part of a sentence.
Status plan_reduction(const OpSpec& spec, DType dtype, int size, ReductionPlan& plan);

}  // namespace horovod::nccl
