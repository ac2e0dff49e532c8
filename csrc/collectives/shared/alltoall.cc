// Buffers are cut into one part for each receiver; part d of a member's buffer holds what it sends to member d.
#include <cstring>
#include <limits>

#include "collectives/rows.h"
#include "collectives/shared/collectives.h"
#include "collectives/shared/gather.h"
#include "kernels/copy.h"

namespace horovod::shared {
namespace {

Status run_one(Region& region, Operation& operation) {
  const int size = region.size();
  const int rank = region.rank();
  const int64_t row_bytes = operation.spec.tensors[0].row_bytes();
  std::vector<int64_t> mine;
  for (int to = 0; to < size; ++to) mine.push_back(rows_to(operation, 0, to, size));
  std::vector<int64_t> rows;  // rows[from * size + to]
  Operation* one[] = {&operation};
  HVD_TRY(learn_counts(region, one, mine, rows));

  std::vector<int64_t> receive(static_cast<size_t>(size));
  int64_t total = 0;
  int64_t most = 0;  // most rows from any member to any other
  for (int from = 0; from < size; ++from) {
    receive[from] = rows[static_cast<size_t>(from) * size + rank];
    HVD_TRY(add_split(operation, 0, from, size, region.label(from), receive[from], total));
    for (int to = 0; to < size; ++to) {
      int64_t others = 0;
      HVD_TRY(add_rows(operation, region.label(from), rows[static_cast<size_t>(from) * size + to], others,
                       std::numeric_limits<int32_t>::max()));
      most = std::max(most, others);
    }
  }
  int64_t longest = 0;
  if (__builtin_mul_overflow(most, row_bytes, &longest)) {
    return {Code::internal, error_code::out_of_memory,
            "There is no memory for " + std::to_string(most) + " rows of " + operation.spec.name + "."};
  }
  operation.outputs.resize(1);
  HVD_TRY(make_rows(operation, 0, total));
  const OutputBuffer& output = operation.outputs[0];
  std::vector<const std::byte*> sources;
  std::vector<std::byte*> targets;
  const std::byte* source = operation.spans[0].input;
  std::byte* target = output.data.get();
  for (int member = 0; member < size; ++member) {
    sources.push_back(source);
    targets.push_back(target);
    source += mine[member] * row_bytes;
    target += receive[member] * row_bytes;
  }
  const kernels::ResultCopy copy(output.bytes);
  copy(targets[rank], sources[rank], static_cast<size_t>(mine[rank] * row_bytes));

  const int64_t part = static_cast<int64_t>(region.buffer_bytes()) / size / 64 * 64;
  const int64_t rounds = (longest + part - 1) / part;
  const uint64_t first = region.take_rounds(static_cast<uint64_t>(rounds));
  const auto piece = [&](int64_t count, int64_t begin) {
    return std::clamp<int64_t>(count * row_bytes - begin, 0, part);
  };
  for (int64_t index = 0; index < rounds; ++index) {
    const uint64_t round = first + static_cast<uint64_t>(index);
    const int64_t begin = index * part;
    HVD_TRY(region.await_buffer(round));
    for (int step = 1; step < size; ++step) {
      const int to = (rank + step) % size;
      const int64_t bytes = piece(mine[to], begin);
      if (bytes > 0)
        std::memcpy(region.buffer(rank, round) + to * part, sources[to] + begin, static_cast<size_t>(bytes));
    }
    region.publish(Phase::posted, round + 1);
    for (int step = 1; step < size; ++step) {
      const int from = (rank + step) % size;
      HVD_TRY(region.await(from, Phase::posted, round + 1));
      const auto bytes = static_cast<size_t>(piece(receive[from], begin));
      copy(targets[from] + begin, region.buffer(from, round) + rank * part, bytes);
    }
    region.publish(Phase::finished, round + 1);
  }
  return {};
}

}  // namespace

Status alltoall(Region& region, Batch batch) {
  for (Operation* operation : batch) HVD_TRY(run_one(region, *operation));
  return {};
}

}  // namespace horovod::shared
