// Collectives through shared memory (and, with in-process segments, between threads), one file each. A call runs one
// batch on this member; every member of the region calls the same function with a matching batch. Elements are reduced
// in rank order, so results do not depend on position, batch or arrival.
#pragma once

#include "collectives/batch.h"
#include "transport/region.h"

namespace horovod::shared {

Status allreduce(Region& region, Batch batch);
Status allreduce(Region& region, Batch batch, const Reduction& reduction);  // not with the reduction of the specs
Status broadcast(Region& region, Batch batch);
Status allgather(Region& region, Batch batch);
Status alltoall(Region& region, Batch batch);
Status reducescatter(Region& region, Batch batch);

}  // namespace horovod::shared
