// The one reduction over several hosts, of which allreduce and reducescatter are uses.
#pragma once

#include <span>

#include "collectives/hierarchical/collectives.h"
#include "collectives/mesh/reduce_slices.h"

namespace horovod::hierarchical {

// As mesh::reduce_slices, for slices that are disjoint (Flow::scatter and Flow::scatter_gather).
Status reduce_slices(Hierarchy& hierarchy, std::span<const mesh::Slice> slices, const Reduction& reduction,
                     mesh::Flow flow);

// Whether it can: a staging buffer must hold a chunk for every member. Depends only on what all members agree on.
bool fits(const Hierarchy& hierarchy);

}  // namespace horovod::hierarchical
