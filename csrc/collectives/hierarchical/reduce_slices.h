// The reduction over several hosts that allreduce and reducescatter use.
#pragma once

#include <span>

#include "collectives/hierarchical/collectives.h"
#include "collectives/mesh/reduce_slices.h"

namespace horovod::hierarchical {

// Like mesh::reduce_slices, for slices that are disjoint (Flow::scatter and Flow::scatter_gather).
Status reduce_slices(Hierarchy& hierarchy, std::span<const mesh::Slice> slices, const Reduction& reduction,
                     mesh::Flow flow);

// Whether reduce_slices can be used: a staging buffer must hold a chunk for every member. The answer depends only on
// what all members agree on.
bool fits(const Hierarchy& hierarchy);

}  // namespace horovod::hierarchical
