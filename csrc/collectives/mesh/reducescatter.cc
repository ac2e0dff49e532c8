// Each member reduces its own rows of every tensor: the first half of a large allreduce.
#include <deque>

#include "collectives/mesh/collectives.h"
#include "collectives/mesh/reduce_slices.h"

namespace horovod::mesh {

Status reducescatter(Mesh& mesh, Batch batch) {
  if (batch.empty() || batch[0]->spec.tensors.empty()) return {};
  const int n = mesh.size();
  const Reduction reduction = Reduction::of(batch[0]->spec, n);
  const size_t element_bytes = size_of(reduction.dtype);
  std::vector<std::vector<Span>> rows(n);  // by the member that reduces them
  for (Operation* operation : batch) {
    const OpSpec& spec = operation->spec;
    operation->outputs.resize(spec.tensors.size());
    for (size_t t = 0; t < spec.tensors.size(); ++t) {
      const int64_t row_elements = spec.tensors[t].row_elements();
      for (int j = 0; j < n; ++j) {
        const RowRange range = split_rows(spec.tensors[t].rows(), n, j);
        Span span;
        span.input = operation->spans[t].input + static_cast<size_t>(range.first * row_elements) * element_bytes;
        span.count = range.count * row_elements;
        if (j == mesh.rank()) {
          OutputBuffer& output = operation->outputs[t];
          output.shape = spec.tensors[t].shape;
          if (output.shape.empty()) output.shape = {0};
          output.shape[0] = range.count;
          if (!output.allocate(static_cast<size_t>(span.count) * element_bytes)) {
            return {Code::internal, "There is not enough memory for the result of " + spec.name + "."};
          }
          span.output = output.data.get();
        }
        rows[j].push_back(span);
      }
    }
  }
  std::deque<SpanList> lists;  // stays in place, as slices point into it
  std::vector<Slice> slices;
  for (const std::vector<Span>& spans : rows) {
    const SpanList& list = lists.emplace_back(spans, reduction.dtype);
    slices.push_back({&list, 0, list.elements()});
  }
  return reduce_slices(mesh, slices, reduction, Flow::scatter);
}

}  // namespace horovod::mesh
