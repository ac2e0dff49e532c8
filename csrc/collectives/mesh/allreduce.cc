// Small arrays: each member sends all its elements to every other and reduces by itself, in one message delay. Large
// ones: each member reduces one slice and sends the result to all, two message delays but only 2 (n - 1) / n of the
// array on each wire, the least possible (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", 2009).
#include "collectives/mesh/collectives.h"
#include "collectives/mesh/slices.h"

namespace horovod::mesh {

Status allreduce(Mesh& mesh, Batch batch) {
  if (batch.empty() || batch[0]->spec.tensors.empty()) return {};
  const int n = mesh.size();
  const SpanList list(batch);
  const Reduction reduction = Reduction::of(batch[0]->spec, n);
  if (is_worth_replicating(list.elements() * static_cast<int64_t>(list.element_bytes()), n)) {
    const std::vector<Slice> whole(n, {&list, 0, list.elements()});
    return reduce_slices(mesh, whole, reduction, Flow::replicate);
  }
  return reduce_slices(mesh, equal_slices(list, n), reduction, Flow::scatter_gather);
}

}  // namespace horovod::mesh
