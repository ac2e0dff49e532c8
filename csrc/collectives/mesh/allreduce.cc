// Small arrays: everybody sends everything to everybody and reduces it itself, one message delay. Large ones: each
// member reduces one slice and sends the result to all, two message delays but only 2 (n - 1) / n of the array on each
// wire, the least possible (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", 2009).
#include "collectives/mesh/collectives.h"
#include "collectives/mesh/reduce_slices.h"

namespace horovod::mesh {
namespace {

// Where one delay is worth the longer messages; measured over loopback. Between two members they are not even longer.
constexpr int64_t kReplicateBytes = 32 << 10;  // received in all
constexpr int64_t kReplicatePairBytes = 256 << 10;
constexpr int64_t kSliceAlignment = 64;  // elements

}  // namespace

Status allreduce(Mesh& mesh, Batch batch) {
  if (batch.empty() || batch[0]->spec.tensors.empty()) return {};
  const int n = mesh.size();
  const SpanList list(batch);
  const int64_t elements = list.elements();
  const Reduction reduction = Reduction::of(batch[0]->spec, n);
  std::vector<Slice> slices(n, {&list, 0, elements});
  const int64_t bytes = elements * static_cast<int64_t>(list.element_bytes());
  if (bytes * (n - 1) <= (n == 2 ? kReplicatePairBytes : kReplicateBytes)) {
    return reduce_slices(mesh, slices, reduction, Flow::replicate);
  }
  const int64_t each = (elements / n + kSliceAlignment) / kSliceAlignment * kSliceAlignment;
  for (int j = 0; j < n; ++j) {
    slices[j].begin = std::min(each * j, elements);
    slices[j].end = std::min(each * (j + 1), elements);
  }
  return reduce_slices(mesh, slices, reduction, Flow::scatter_gather);
}

}  // namespace horovod::mesh
