// Exchanges rows whose number only the sender knows: first the counts, then the bytes. Few bytes travel with the
// counts, so that they cost one message delay and not two.
#pragma once

#include <vector>

#include <sys/uio.h>

#include "transport/mesh.h"

namespace horovod::mesh {

class RowExchange {
 public:
  // items: how many tensors each message covers. row_bytes[i]: of one row of tensor i, equal on all members.
  RowExchange(Mesh& mesh, std::vector<int64_t> row_bytes);

  // To be filled before exchange_counts(), for each peer: rows of each tensor, and where they lie.
  std::vector<std::vector<int64_t>> rows_out;
  std::vector<std::vector<iovec>> pieces_out;

  // Fills rows_in, for each peer the rows of each tensor.
  Status exchange_counts();
  std::vector<std::vector<int64_t>> rows_in;

  // To be filled before exchange_rows(), for each peer: where its rows go, in the order of the tensors.
  std::vector<std::vector<iovec>> pieces_in;
  Status exchange_rows();

 private:
  Mesh& mesh_;
  const std::vector<int64_t> row_bytes_;
  std::vector<std::vector<std::byte>> heads_in_;
};

}  // namespace horovod::mesh
