#include "collectives/mesh/slices.h"

#include <algorithm>

namespace horovod::mesh {
namespace {

// Up to these sizes each member gets all data and reduces all of it itself. Measured over loopback. The limit for two
// members is higher, since their messages are no longer than with slices.
constexpr int64_t kReplicateBytes = 32 << 10;  // bytes that a member receives in all
constexpr int64_t kReplicatePairBytes = 256 << 10;
constexpr int64_t kSliceAlignment = 64;  // elements

}  // namespace

bool is_worth_replicating(int64_t bytes, int size) {
  return bytes * (size - 1) <= (size == 2 ? kReplicatePairBytes : kReplicateBytes);
}

std::vector<Slice> equal_slices(const SpanList& list, int size) {
  const int64_t elements = list.elements();
  const int64_t share = (elements + size - 1) / size;
  const int64_t each = (share + kSliceAlignment - 1) / kSliceAlignment * kSliceAlignment;
  std::vector<Slice> slices;
  for (int j = 0; j < size; ++j) {
    slices.push_back({&list, std::min(each * j, elements), std::min(each * (j + 1), elements)});
  }
  return slices;
}

Status slice_rows(Batch batch, int me, int size, RowSlices& rows) {
  const DType dtype = batch[0]->spec.tensors[0].dtype;
  const size_t element_bytes = size_of(dtype);
  std::vector<std::vector<Span>> by_member(size);
  for (Operation* operation : batch) {
    const OpSpec& spec = operation->spec;
    operation->outputs.resize(spec.tensors.size());
    for (size_t t = 0; t < spec.tensors.size(); ++t) {
      const int64_t row_elements = spec.tensors[t].row_elements();
      for (int j = 0; j < size; ++j) {
        const RowRange range = split_rows(spec.tensors[t].rows(), size, j);
        Span span;
        span.input = operation->spans[t].input + static_cast<size_t>(range.first * row_elements) * element_bytes;
        span.count = range.count * row_elements;
        if (j == me) {
          OutputBuffer& output = operation->outputs[t];
          output.shape = spec.tensors[t].shape;
          if (output.shape.empty()) output.shape = {0};
          output.shape[0] = range.count;
          if (!output.allocate(static_cast<size_t>(span.count) * element_bytes)) {
            return {Code::internal, error_code::out_of_memory,
                    "There is not enough memory for the result of " + spec.name + "."};
          }
          span.output = output.data.get();
        }
        by_member[j].push_back(span);
      }
    }
  }
  for (const std::vector<Span>& spans : by_member) {
    const SpanList& list = rows.lists.emplace_back(spans, dtype);
    rows.slices.push_back({&list, 0, list.elements()});
  }
  return {};
}

}  // namespace horovod::mesh
