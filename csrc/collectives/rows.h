// Results whose number of rows only the senders know (allgather, alltoall): what they say is checked and added up, and
// room is made for it.
#pragma once

#include <cstdint>
#include <limits>
#include <string>

#include "collectives/operation.h"

namespace horovod {

inline constexpr int64_t kMostRows = int64_t{1} << 48;  // of one member: the sum over 32767 members is a number, too

// How many rows of a tensor an alltoall sends to `member` of `size`.
int64_t rows_to(const Operation& operation, size_t tensor, int member, int size);

// total += rows. Fails where that can't be what `sender` has.
Status add_rows(const Operation& operation, const std::string& sender, int64_t rows, int64_t& total,
                int64_t most = kMostRows);

// The same for what `member` of `size` sends in an alltoall, which is noted in received_splits.
Status add_split(Operation& operation, size_t tensor, int member, int size, const std::string& sender, int64_t rows,
                 int64_t& total);

// outputs[tensor], which exists, gets its shape and memory.
Status make_rows(Operation& operation, size_t tensor, int64_t rows);

}  // namespace horovod
