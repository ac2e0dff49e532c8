// Collectives over several hosts where the members of a host share memory: data that several members of a host send or
// receive crosses the network once. A call runs one batch on this member; every member of the mesh calls the same
// function with a matching batch. Elements are reduced in the order that hosts.h fixes.
#pragma once

#include "collectives/batch.h"
#include "collectives/hosts.h"
#include "transport/mesh.h"
#include "transport/region.h"

namespace horovod {

struct Hierarchy {
  Mesh* mesh;           // of all members
  Region* region;       // of the members of this host, in rank order; null for a member that is alone there
  Hosts hosts;          // at least two; in a sparse mesh a member that shares no memory is a host of its own
  size_t buffer_bytes;  // of every region; known to members without one, too
};

}  // namespace horovod

namespace horovod::hierarchical {

Status allreduce(Hierarchy& hierarchy, Batch batch);
Status reducescatter(Hierarchy& hierarchy, Batch batch);

}  // namespace horovod::hierarchical
