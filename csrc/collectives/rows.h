// Results whose number of rows only the senders know (allgather, alltoall): checks the row counts that the senders
// tell, adds them up, and makes room for the rows.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "collectives/operation.h"

namespace horovod {

// rows of one member; the sum of 65535 members' rows still fits an int64_t
inline constexpr int64_t kMostRows = int64_t{1} << 47;

Status bad_rows(const Operation& operation, const std::string& sender, int64_t rows, int64_t most);

// The number of rows of a tensor that an alltoall sends to `member` of `size`.
inline int64_t rows_to(const Operation& operation, size_t tensor, int member, int size) {
  return operation.splits.empty() ? operation.spec.tensors[tensor].rows() / size : operation.splits[member];
}

// splits[member]: the rows that an alltoall sends to each of `size` members. Fails where they are not what the tensor
// has.
Status splits_of(const Operation& operation, size_t tensor, int size, std::vector<int64_t>& splits);

// Whether `member` of a mesh can have so many rows of each tensor, which are `claimed` bytes together. To be asked
// before memory is allocated for them. row_bytes[i]: the bytes of a row of tensor i on this member.
Status check_announced(int member, std::span<const int64_t> rows, std::span<const int64_t> row_bytes, uint64_t claimed);

// total += rows. Fails where `sender` can't have so many. Inline, because small operations spend much of their time
// here.
inline Status add_rows(const Operation& operation, const std::string& sender, int64_t rows, int64_t& total,
                       int64_t most = kMostRows) {
  total += rows;
  if (rows < 0 || rows > most) [[unlikely]]
    return bad_rows(operation, sender, rows, most);
  return {};
}

// The same for what `member` of `size` sends in an alltoall, which is noted in received_splits.
inline Status add_split(Operation& operation, size_t tensor, int member, int size, const std::string& sender,
                        int64_t rows, int64_t& total) {
  HVD_TRY(add_rows(operation, sender, rows, total, std::numeric_limits<int32_t>::max()));
  operation.received_splits.resize(static_cast<size_t>(size));
  if (tensor == 0) operation.received_splits[static_cast<size_t>(member)] = static_cast<int32_t>(rows);
  return {};
}

// Gives outputs[tensor], which exists, its shape and memory.
Status make_rows(Operation& operation, size_t tensor, int64_t rows);

}  // namespace horovod
