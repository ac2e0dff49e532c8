// Rows whose owner is on another host are reduced within each host first, and cross the network once.
#include "collectives/hierarchical/collectives.h"
#include "collectives/hierarchical/reduce_slices.h"
#include "collectives/mesh/slices.h"

namespace horovod::hierarchical {
namespace {

// Bytes of the whole array; smaller ones skip the host, because waiting for it takes longer.
constexpr int64_t kDirectBytes = 64 << 10;

}  // namespace

Status reducescatter(Hierarchy& hierarchy, Batch batch) {
  if (batch.empty() || batch[0]->spec.tensors.empty()) return {};
  const int n = hierarchy.mesh->size();
  const Reduction reduction = Reduction::of(batch[0]->spec, n);
  mesh::RowSlices rows;
  HVD_TRY(mesh::slice_rows(batch, hierarchy.mesh->rank(), n, rows));
  int64_t bytes = 0;
  for (const mesh::Slice& slice : rows.slices) bytes += slice.size() * static_cast<int64_t>(size_of(reduction.dtype));
  if (bytes <= kDirectBytes) {
    return mesh::reduce_slices(*hierarchy.mesh, rows.slices, reduction, mesh::Flow::scatter, &hierarchy.hosts);
  }
  return reduce_slices(hierarchy, rows.slices, reduction, mesh::Flow::scatter);
}

}  // namespace horovod::hierarchical
