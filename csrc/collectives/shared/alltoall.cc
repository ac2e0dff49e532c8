// Slots are cut into one part for each receiver; part d of a member's slot holds what it sends to member d.
#include <cstring>
#include <limits>

#include "collectives/shared/collectives.h"
#include "collectives/shared/gather.h"
#include "kernels/copy.h"

namespace horovod::shared {
namespace {

Status run_one(Region& region, Operation& operation) {
  const int size = region.size();
  const int rank = region.rank();
  const TensorSpec& tensor = operation.spec.tensors[0];
  const int64_t row_bytes = tensor.row_elements() * static_cast<int64_t>(size_of(tensor.dtype));
  std::vector<int64_t> mine(operation.splits.begin(), operation.splits.end());
  if (mine.empty()) mine.assign(static_cast<size_t>(size), tensor.rows() / size);
  std::vector<int64_t> rows;  // rows[from * size + to]
  Operation* one[] = {&operation};
  HVD_TRY(learn_counts(region, one, mine, rows));

  std::vector<int64_t> receive(static_cast<size_t>(size));
  int64_t total_rows = 0;
  int64_t longest = 0;
  for (int from = 0; from < size; ++from) {
    for (int to = 0; to < size; ++to) {
      int64_t bytes = 0;
      const int64_t count = rows[static_cast<size_t>(from) * size + to];
      if (count < 0 || count > std::numeric_limits<int32_t>::max() ||
          __builtin_mul_overflow(count, row_bytes, &bytes)) {
        return bad_count(operation, region, from);
      }
      longest = std::max(longest, bytes);
    }
    receive[from] = rows[static_cast<size_t>(from) * size + rank];
    total_rows += receive[from];
    operation.received_splits.push_back(static_cast<int32_t>(receive[from]));
  }
  operation.outputs.resize(1);
  OutputBuffer& output = operation.outputs[0];
  output.shape = tensor.shape;
  output.shape[0] = total_rows;
  int64_t total_bytes = 0;
  if (__builtin_mul_overflow(total_rows, row_bytes, &total_bytes) ||
      !output.allocate(static_cast<size_t>(total_bytes))) {
    return {Code::internal, "Not enough memory for the result of " + operation.spec.name + "."};
  }
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

  const int64_t part = static_cast<int64_t>(region.slot_bytes()) / size / 64 * 64;
  const int64_t rounds = (longest + part - 1) / part;
  const uint64_t first = region.take_rounds(static_cast<uint64_t>(rounds));
  const auto piece = [&](int64_t count, int64_t begin) {
    return std::clamp<int64_t>(count * row_bytes - begin, 0, part);
  };
  for (int64_t index = 0; index < rounds; ++index) {
    const uint64_t round = first + static_cast<uint64_t>(index);
    const int64_t begin = index * part;
    HVD_TRY(region.await_slot(round));
    for (int step = 1; step < size; ++step) {
      const int to = (rank + step) % size;
      const int64_t bytes = piece(mine[to], begin);
      if (bytes > 0) std::memcpy(region.slot(rank, round) + to * part, sources[to] + begin, static_cast<size_t>(bytes));
    }
    region.publish(Phase::posted, round + 1);
    for (int step = 1; step < size; ++step) {
      const int from = (rank + step) % size;
      HVD_TRY(region.await(from, Phase::posted, round + 1));
      const auto bytes = static_cast<size_t>(piece(receive[from], begin));
      copy(targets[from] + begin, region.slot(from, round) + rank * part, bytes);
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
