// Small arrays are reduced as without a hierarchy, but in its order. Large ones are reduced within each host and then
// between the hosts, slice by slice (reduce_slices.cc).
#include "collectives/hierarchical/collectives.h"
#include "collectives/hierarchical/reduce_slices.h"
#include "collectives/mesh/slices.h"

namespace horovod::hierarchical {

Status allreduce(Hierarchy& hierarchy, Batch batch) {
  if (batch.empty() || batch[0]->spec.tensors.empty()) return {};
  const int n = hierarchy.mesh->size();
  const SpanList list(batch);
  const Reduction reduction = Reduction::of(batch[0]->spec, n);
  if (mesh::is_worth_replicating(list.elements() * static_cast<int64_t>(list.element_bytes()), n)) {
    const std::vector<mesh::Slice> whole(n, {&list, 0, list.elements()});
    return mesh::reduce_slices(*hierarchy.mesh, whole, reduction, mesh::Flow::replicate, &hierarchy.hosts);
  }
  return reduce_slices(hierarchy, mesh::equal_slices(list, n), reduction, mesh::Flow::scatter_gather);
}

}  // namespace horovod::hierarchical
