// How each type of operation is done, by where the members are. One record for each type, beside its algorithms or in
// algorithms.cc; what a record leaves out is done in a way that it has.
#pragma once

#include "collectives/batch.h"
#include "collectives/data_plane.h"

namespace horovod {

struct Algorithms {
  Status (*shared)(Region&, Batch) = nullptr;           // all members share memory
  Status (*mesh)(Mesh&, Batch) = nullptr;               // the members are connected by sockets
  Status (*hierarchical)(Hierarchy&, Batch) = nullptr;  // also, some share memory; null: as if none did
  Status (*sparse)(Hierarchy&, Batch) = nullptr;        // sockets to partners only (partners.h)
  // By way of other types of operations, which it runs with run_batch(). In place of each of the above that is null, so
  // that a new type needs nothing else.
  Status (*composed)(const DataPlane&, Operation&) = nullptr;
};

namespace algorithms {
#define HVD_ALGORITHMS(type, ...) extern const Algorithms type;
HVD_OP_TYPES(HVD_ALGORITHMS)
#undef HVD_ALGORITHMS
}  // namespace algorithms

const Algorithms& algorithms_of(OpType type);

}  // namespace horovod
