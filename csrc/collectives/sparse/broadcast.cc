// The binomial tree and the chain of a full mesh, whose edges are between partners.
#include "collectives/mesh/collectives.h"
#include "collectives/sparse/collectives.h"

namespace horovod::sparse {

Status broadcast(Hierarchy& hierarchy, Batch batch) { return mesh::broadcast(*hierarchy.mesh, batch); }

}  // namespace horovod::sparse
