// Picks the algorithm for a batch: by where the members are (one process alone, one host, several hosts).
#pragma once

#include "collectives/backend.h"
#include "collectives/batch.h"
#include "collectives/hierarchical/collectives.h"
#include "transport/mesh.h"
#include "transport/region.h"

namespace horovod {

// What a communicator moves data with: a region or a mesh, none for a world of one.
struct DataPlane {
  Region* region = nullptr;  // of all members
  Mesh* mesh = nullptr;
  Hierarchy* hierarchy = nullptr;   // beside the mesh, where some members share memory
  Backend* backend = nullptr;       // runs over the mesh, in place of our own algorithms
  DeviceBackend* device = nullptr;  // for operations on a device; beside all others, which it uses
  // Of the mesh, those who run batches here, this one among them; empty: all. Only Adasum can be run by some.
  std::vector<int> members;
};

// Runs the batch (operations of equal type, dtype and factors) to its end on this member; on a device: queues it there.
Status run_batch(const DataPlane& plane, Batch batch);

// Equally many bytes from each member, in their order. Like a batch: by all members at the same place in their order.
Status gather_bytes(const DataPlane& plane, const void* mine, size_t bytes, std::vector<std::byte>& all);

}  // namespace horovod
