// Sends each row to its destination: all pairs at once, straight from the input into the result.
#include <cstring>

#include "collectives/mesh/collectives.h"
#include "collectives/mesh/row_exchange.h"
#include "collectives/rows.h"

namespace horovod::mesh {

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
