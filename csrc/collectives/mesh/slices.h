// Which member reduces which elements of a batch. These functions depend only on what all members agree on.
#pragma once

#include <deque>
#include <vector>

#include "collectives/mesh/reduce_slices.h"

namespace horovod::mesh {

// Whether all members should reduce all elements, because longer messages cost less than a second message delay.
bool is_worth_replicating(int64_t bytes, int size);

// Equal parts of the array in the order of the members.
std::vector<Slice> equal_slices(const SpanList& list, int size);

// For each member, its rows of every tensor.
struct RowSlices {
  std::deque<SpanList> lists;  // stays in place, as slices point into it
  std::vector<Slice> slices;
};
// Makes the outputs of member `me`, too.
Status slice_rows(Batch batch, int me, int size, RowSlices& rows);

}  // namespace horovod::mesh
