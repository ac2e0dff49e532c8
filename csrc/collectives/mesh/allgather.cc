// Sends every member's rows to every member: all pairs at once, straight from the input into the result.
#include <cstring>

#include "collectives/mesh/collectives.h"
#include "collectives/mesh/row_exchange.h"
#include "collectives/rows.h"

namespace horovod::mesh {

Status allgather(Mesh& mesh, Batch batch) {
  const int n = mesh.size();
  const int me = mesh.rank();
  std::vector<int64_t> row_bytes, rows;
  std::vector<iovec> inputs;
  for (Operation* operation : batch) {
    for (size_t t = 0; t < operation->spec.tensors.size(); ++t) {
      const TensorSpec& tensor = operation->spec.tensors[t];
      row_bytes.push_back(tensor.row_bytes());
      rows.push_back(tensor.rows());
      inputs.push_back(
          {const_cast<std::byte*>(operation->spans[t].input), static_cast<size_t>(rows.back() * row_bytes.back())});
    }
  }
  RowExchange exchange(mesh, row_bytes);
  for (int peer = 0; peer < n; ++peer) {
    exchange.rows_out[peer] = rows;
    exchange.pieces_out[peer] = inputs;
  }
  HVD_TRY(exchange.exchange_counts());
  size_t item = 0;
  for (Operation* operation : batch) {
    operation->outputs.resize(operation->spec.tensors.size());
    for (size_t t = 0; t < operation->spec.tensors.size(); ++t, ++item) {
      int64_t total = 0;
      for (int peer = 0; peer < n; ++peer) total += exchange.rows_in[peer][item];
      HVD_TRY(make_rows(*operation, t, total));
      std::byte* at = operation->outputs[t].data.get();
      for (int peer = 0; peer < n; ++peer) {
        const auto bytes = static_cast<size_t>(exchange.rows_in[peer][item] * row_bytes[item]);
        exchange.pieces_in[peer].push_back({at, bytes});
        if (peer == me && bytes > 0) std::memcpy(at, inputs[item].iov_base, bytes);
        at += bytes;
      }
    }
  }
  return exchange.exchange_rows();
}

}  // namespace horovod::mesh
