// Each member reduces its own rows of every tensor, as in the first half of a large allreduce.
#include "collectives/mesh/collectives.h"
#include "collectives/mesh/slices.h"

namespace horovod::mesh {

Status reducescatter(Mesh& mesh, Batch batch) {
  if (batch.empty() || batch[0]->spec.tensors.empty()) return {};
  RowSlices rows;
  HVD_TRY(slice_rows(batch, mesh.rank(), mesh.size(), rows));
  return reduce_slices(mesh, rows.slices, Reduction::of(batch[0]->spec, mesh.size()), Flow::scatter);
}

}  // namespace horovod::mesh
