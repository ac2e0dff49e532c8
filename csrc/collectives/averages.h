// Averages of integers. A sum of integers may not fit the tensor's type, so they are added up in a wider form:
//
//     types of up to 32 bits    as int64, which holds the sum of 2^31 members
//     64 bits                   each x as two int64, floor(x / n) and x mod n: neither sum exceeds 64 bits
//
// and divided by n exactly, truncated toward zero. A postscale factor other than 1 is applied together with the
// division, in double precision. Prescale factors are applied before, in the tensor's own type, as everywhere
// (kernels::scale). More bytes travel than for floating-point numbers, up to 8 times as many; averages of integers are
// rare.
#pragma once

#include "collectives/batch.h"
#include "collectives/data_plane.h"

namespace horovod {

// Whether average_integers() is to run this operation; the dtype of its first tensor counts for all.
inline bool averages_integers(const OpSpec& spec) {
  return spec.reduce_op == ReduceOp::average && traits_of(spec.type).reduces && !spec.tensors.empty() &&
         !is_floating(spec.tensors[0].dtype) && spec.tensors[0].dtype != DType::boolean;
}

// Runs a batch of equal type, dtype and factors, by sums that it runs with run_batch().
Status average_integers(const DataPlane& plane, Batch batch);

}  // namespace horovod
