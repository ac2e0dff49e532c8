#include "collectives/rows.h"

namespace horovod {

Status bad_rows(const Operation& operation, const std::string& sender, int64_t rows, int64_t most) {
  return {Code::aborted, sender + " announced " + std::to_string(rows) + " rows for " + operation.spec.name +
                             ", where there can be 0 to " + std::to_string(most) + "; this epoch can't go on."};
}

Status make_rows(Operation& operation, size_t tensor, int64_t rows) {
  const TensorSpec& spec = operation.spec.tensors[tensor];
  OutputBuffer& output = operation.outputs[tensor];
  output.shape = spec.shape;
  if (output.shape.empty()) output.shape = {0};
  output.shape[0] = rows;
  int64_t bytes = 0;
  if (!__builtin_mul_overflow(rows, spec.row_bytes(), &bytes) && output.allocate(static_cast<size_t>(bytes))) return {};
  return {Code::internal, "There is not enough memory for the " + std::to_string(rows) + " rows of the result of " +
                              operation.spec.name + "."};
}

}  // namespace horovod
