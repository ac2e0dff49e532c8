#include "collectives/sparse/collectives.h"

namespace horovod::sparse {

Status reducescatter(Hierarchy&, Batch) { return {Code::internal, "There is no reducescatter over a sparse mesh yet."}; }

}  // namespace horovod::sparse
