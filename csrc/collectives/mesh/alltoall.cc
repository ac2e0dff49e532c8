// Rows by destination: all pairs at once, straight from the input into the result.
#include <cstring>
#include <limits>
#include <numeric>

#include "collectives/mesh/collectives.h"
#include "collectives/mesh/row_exchange.h"

namespace horovod::mesh {
namespace {

// Rows for each member, or why there are none.
Status splits_of(const Operation& operation, size_t tensor, int n, std::vector<int64_t>& splits) {
  const int64_t rows = operation.spec.tensors[tensor].rows();
  if (operation.splits.empty()) {
    splits.assign(n, rows / n);
    if (rows % n == 0) return {};
    return {Code::invalid_argument, operation.spec.name + ": " + std::to_string(rows) +
                                        " rows are not divisible by the " + std::to_string(n) +
                                        " ranks; pass splits to send uneven parts."};
  }
  splits.assign(operation.splits.begin(), operation.splits.end());
  const bool sane = splits.size() == static_cast<size_t>(n) &&
                    std::all_of(splits.begin(), splits.end(), [](int64_t part) { return part >= 0; }) &&
                    std::accumulate(splits.begin(), splits.end(), int64_t{0}) <= rows;
  if (sane) return {};
  return {Code::invalid_argument, operation.spec.name + ": splits must be one number for each of the " +
                                      std::to_string(n) + " ranks, none negative, and at most " + std::to_string(rows) +
                                      " (the rows of the tensor) together."};
}

}  // namespace

Status alltoall(Mesh& mesh, Batch batch) {
  const int n = mesh.size();
  const int me = mesh.rank();
  std::vector<int64_t> row_bytes;
  for (Operation* operation : batch) {
    for (const TensorSpec& tensor : operation->spec.tensors) {
      row_bytes.push_back(tensor.row_elements() * static_cast<int64_t>(size_of(tensor.dtype)));
    }
  }
  RowExchange exchange(mesh, row_bytes);
  size_t item = 0;
  for (Operation* operation : batch) {
    for (size_t t = 0; t < operation->spec.tensors.size(); ++t, ++item) {
      std::vector<int64_t> splits;
      HVD_TRY(splits_of(*operation, t, n, splits));
      auto* at = const_cast<std::byte*>(operation->spans[t].input);
      for (int peer = 0; peer < n; ++peer) {
        const auto bytes = static_cast<size_t>(splits[peer] * row_bytes[item]);
        exchange.rows_out[peer].push_back(splits[peer]);
        exchange.pieces_out[peer].push_back({at, bytes});
        at += bytes;
      }
    }
  }
  HVD_TRY(exchange.exchange_counts());
  item = 0;
  for (Operation* operation : batch) {
    operation->outputs.resize(operation->spec.tensors.size());
    operation->received_splits.assign(n, 0);
    for (size_t t = 0; t < operation->spec.tensors.size(); ++t, ++item) {
      int64_t total = 0;
      for (int peer = 0; peer < n; ++peer) {
        const int64_t rows = exchange.rows_in[peer][item];
        if (rows > std::numeric_limits<int32_t>::max()) {
          return {Code::aborted, "Rank " + std::to_string(peer) + " of the mesh sends " + std::to_string(rows) +
                                     " rows in " + operation->spec.name + ", more than a split can say."};
        }
        if (t == 0) operation->received_splits[peer] = static_cast<int32_t>(rows);
        total += rows;
      }
      OutputBuffer& output = operation->outputs[t];
      output.shape = operation->spec.tensors[t].shape;
      if (output.shape.empty()) output.shape = {0};
      output.shape[0] = total;
      if (!output.allocate(static_cast<size_t>(total * row_bytes[item]))) {
        return {Code::internal, "There is not enough memory for the " + std::to_string(total) + " rows that " +
                                    operation->spec.name + " receives."};
      }
      std::byte* at = output.data.get();
      for (int peer = 0; peer < n; ++peer) {
        const auto bytes = static_cast<size_t>(exchange.rows_in[peer][item] * row_bytes[item]);
        exchange.pieces_in[peer].push_back({at, bytes});
        if (peer == me && bytes > 0) std::memcpy(at, exchange.pieces_out[me][item].iov_base, bytes);
        at += bytes;
      }
    }
  }
  return exchange.exchange_rows();
}

}  // namespace horovod::mesh
