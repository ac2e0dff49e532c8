// Collectives over a sparse mesh (partners.h), for worlds so large that a connection to every member would be too much.
// Each member exchanges something with about 2 log2 n others, in about as many steps. One file each; a call runs one
// batch on this member, every member of the mesh calls the same function with a matching batch.
//
// A sum of a member's elements is formed in an order that depends on the members alone (balanced.h for an allreduce);
// it differs from the order in a full mesh.
#pragma once

#include "collectives/batch.h"
#include "collectives/hierarchical/collectives.h"

namespace horovod::sparse {

Status allreduce(Hierarchy& hierarchy, Batch batch);
Status reducescatter(Hierarchy& hierarchy, Batch batch);
Status broadcast(Hierarchy& hierarchy, Batch batch);
Status allgather(Hierarchy& hierarchy, Batch batch);
Status alltoall(Hierarchy& hierarchy, Batch batch);

}  // namespace horovod::sparse
