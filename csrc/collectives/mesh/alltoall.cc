// Rows by destination: all pairs at once, straight from the input into the result.
#include <cstring>
#include <numeric>

#include "collectives/mesh/collectives.h"
#include "collectives/mesh/row_exchange.h"
#include "collectives/rows.h"

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
      row_bytes.push_back(tensor.row_bytes());
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
    for (size_t t = 0; t < operation->spec.tensors.size(); ++t, ++item) {
      int64_t total = 0;
      for (int peer = 0; peer < n; ++peer) {
        const std::string sender = "Rank " + std::to_string(peer) + " of the mesh";
        HVD_TRY(add_split(*operation, t, peer, n, sender, exchange.rows_in[peer][item], total));
      }
      HVD_TRY(make_rows(*operation, t, total));
      std::byte* at = operation->outputs[t].data.get();
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
