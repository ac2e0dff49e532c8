// Picks the algorithm for a batch: by where the members are (one process alone, one host, several hosts).
#pragma once

#include "collectives/batch.h"
#include "collectives/data_plane.h"

namespace horovod {

// Runs the batch (operations of equal type, dtype and factors) to its end on this member; on a device: queues it there.
Status run_batch(const DataPlane& plane, Batch batch);

// This member's rank; for a world of more than one member.
int rank_in(const DataPlane& plane);
int size_of(const DataPlane& plane);

// Gathers equally many bytes from each member, in the order of the members. Like a batch, all members call it at the
// same place of the order log.
Status gather_bytes(const DataPlane& plane, const void* mine, size_t bytes, std::vector<std::byte>& all);

}  // namespace horovod
