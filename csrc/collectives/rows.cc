#include "collectives/rows.h"

#include <algorithm>
#include <numeric>

namespace horovod {
namespace {

constexpr int64_t kMostMessageBytes = kMostRows;  // a peer that claims more is broken as well

}  // namespace

Status bad_rows(const Operation& operation, const std::string& sender, int64_t rows, int64_t most) {
  return {Code::aborted, error_code::unexpected_data,
          capitalized(sender) + " announced " + std::to_string(rows) + " rows for " + operation.spec.name +
              ", where there can be 0 to " + std::to_string(most) + "; this world ends."};
}

Status splits_of(const Operation& operation, size_t tensor, int size, std::vector<int64_t>& splits) {
  const int64_t rows = operation.spec.tensors[tensor].rows();
  if (operation.splits.empty()) {
    splits.assign(static_cast<size_t>(size), rows / size);
    if (rows % size == 0) return {};
    return {Code::invalid_argument, error_code::wrong_splits,
            operation.spec.name + ": " + std::to_string(rows) + " rows are not divisible by the " +
                std::to_string(size) + " ranks; pass splits to send uneven parts."};
  }
  splits.assign(operation.splits.begin(), operation.splits.end());
  const bool sane = splits.size() == static_cast<size_t>(size) &&
                    std::all_of(splits.begin(), splits.end(), [](int64_t part) { return part >= 0; }) &&
                    std::accumulate(splits.begin(), splits.end(), int64_t{0}) <= rows;
  if (sane) return {};
  return {Code::invalid_argument, error_code::wrong_splits,
          operation.spec.name + ": splits must be one number for each of the " + std::to_string(size) +
              " ranks, none negative, and at most " + std::to_string(rows) + " (the rows of the tensor) together."};
}

Status check_announced(int member, std::span<const int64_t> rows, std::span<const int64_t> row_bytes,
                       uint64_t claimed) {
  int64_t bytes = 0;
  for (size_t i = 0; i < rows.size() && bytes >= 0; ++i) {
    const bool sane = rows[i] >= 0 && rows[i] <= (kMostMessageBytes - bytes) / std::max<int64_t>(row_bytes[i], 1);
    bytes = sane ? bytes + rows[i] * row_bytes[i] : -1;
  }
  if (bytes >= 0 && static_cast<uint64_t>(bytes) == claimed) return {};
  return {Code::aborted, error_code::unexpected_data,
          "Rank " + std::to_string(member) + " of the mesh announced " + std::to_string(claimed) +
              " bytes, which is not what its numbers of rows amount to: the ranks do not agree on " +
              "the tensors' shapes, so this world ends."};
}

Status make_rows(Operation& operation, size_t tensor, int64_t rows) {
  const TensorSpec& spec = operation.spec.tensors[tensor];
  OutputBuffer& output = operation.outputs[tensor];
  output.shape = spec.shape;
  if (output.shape.empty()) output.shape = {0};
  output.shape[0] = rows;
  int64_t bytes = 0;
  if (!__builtin_mul_overflow(rows, spec.row_bytes(), &bytes) && output.allocate(static_cast<size_t>(bytes))) return {};
  return {Code::internal, error_code::out_of_memory,
          "There is not enough memory for the " + std::to_string(rows) + " rows of the result of " +
              operation.spec.name + "."};
}

}  // namespace horovod
