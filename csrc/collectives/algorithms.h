// Which functions do each type of operation, by where the members are. Each type has one record, beside its algorithms
// or in algorithms.cc. Where a record has no function for a case, another function of the record does it.
#pragma once

#include "collectives/batch.h"
#include "collectives/data_plane.h"

namespace horovod {

struct Algorithms {
  Status (*shared)(Region&, Batch) = nullptr;           // all members share memory
  Status (*mesh)(Mesh&, Batch) = nullptr;               // the members are connected by sockets
  Status (*hierarchical)(Hierarchy&, Batch) = nullptr;  // some members share memory; null: `mesh` does it
  Status (*sparse)(Hierarchy&, Batch) = nullptr;        // members have sockets to partners only (partners.h)
  // Composes the operation of other types, which it runs with run_batch(). It is used in place of each function above
  // that is null, so a new type needs no other function.
  Status (*composed)(const DataPlane&, Operation&) = nullptr;
};

namespace algorithms {
#define HVD_ALGORITHMS(type, ...) extern const Algorithms type;
HVD_OP_TYPES(HVD_ALGORITHMS)
#undef HVD_ALGORITHMS
}  // namespace algorithms

const Algorithms& algorithms_of(OpType type);

}  // namespace horovod
