// Small operations without a data phase: a member leaves its bytes in a cell of its own area before it arrives in the
// order log. When all members have arrived, all bytes are there, and each member computes the result by itself. So the
// operation takes one synchronisation (the arrival) instead of two or three.
//
// Each id has two cells, used in turn by generations. A member writes the cell of generation g + 2 only after it has
// run generation g + 1. All members had arrived for that, and each of them had read the cells of generation g before.
// So no cell is overwritten before all have read it.
//
// Where the sizes are agreed upon (allreduce, broadcast, reducescatter) so is whether the cells are large enough. Where
// only their owner knows them (allgather, alltoall) every cell begins with its row counts and says whether the rows are
// in it; all members read all cells, so they agree whether the operation runs from them.
#pragma once

#include "collectives/batch.h"
#include "transport/region.h"

namespace horovod::shared {

// Whether the operation uses its cell. This depends only on what all members agreed on, so all of them decide alike.
bool is_eager(const OpSpec& spec, uint32_t id, int size);

// Writes this member's bytes into its cell, before its arrival of that generation.
void store_eager(Region& region, const Operation& operation, uint32_t id, uint32_t generation);

// After agreement, and the same on all members: whether all bytes are in the cells. Then run_eager() computes the
// result from them; else take_rows() takes the row counts (Operation::told_rows) for the data phase.
bool is_complete(const Region& region, const OpSpec& spec, uint32_t id, uint32_t generation);
Status run_eager(Region& region, Operation& operation, uint32_t id, uint32_t generation);
void take_rows(const Region& region, Operation& operation, uint32_t id, uint32_t generation);

}  // namespace horovod::shared
