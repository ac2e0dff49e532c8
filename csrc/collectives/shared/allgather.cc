// Each member streams its rows through its buffers, and every member copies them to their place in the result. The row
// counts may differ by member and step; they have come with the arrivals, or are exchanged first.
#include <cstring>

#include "collectives/rows.h"
#include "collectives/shared/collectives.h"
#include "collectives/shared/gather.h"
#include "kernels/copy.h"

namespace horovod::shared {

Status allgather(Region& region, Batch batch) {
  const int size = region.size();
  std::vector<int64_t> mine;
  for (const Operation* operation : batch) {
    for (const TensorSpec& tensor : operation->spec.tensors) mine.push_back(tensor.rows());
  }
  std::vector<int64_t> rows;
  HVD_TRY(learn_counts(region, batch, mine, rows));

  // streams[m]: member m's bytes, read from its buffers (or, for this member, its input) into our outputs.
  std::vector<std::vector<Span>> streams(static_cast<size_t>(size));
  size_t tensor_index = 0;
  for (Operation* operation : batch) {
    operation->outputs.resize(operation->spans.size());
    for (size_t i = 0; i < operation->spans.size(); ++i, ++tensor_index) {
      const auto rows_of = [&](int member) { return rows[static_cast<size_t>(member) * mine.size() + tensor_index]; };
      int64_t total = 0;
      for (int member = 0; member < size; ++member) {
        HVD_TRY(add_rows(*operation, region.label(member), rows_of(member), total));
      }
      HVD_TRY(make_rows(*operation, i, total));
      std::byte* place = operation->outputs[i].data.get();
      for (int member = 0; member < size; ++member) {
        const int64_t bytes = rows_of(member) * operation->spec.tensors[i].row_bytes();
        streams[static_cast<size_t>(member)].push_back({operation->spans[i].input, place, bytes});
        place += bytes;
      }
    }
  }

  std::vector<SpanList> lists;
  int64_t longest = 0;
  for (const std::vector<Span>& stream : streams) {
    lists.emplace_back(stream, DType::uint8);
    longest = std::max(longest, lists.back().elements());
  }
  int64_t result_bytes = 0;
  for (const SpanList& list : lists) result_bytes += list.elements();
  const kernels::ResultCopy copy(static_cast<size_t>(result_bytes));
  const int64_t per_round = static_cast<int64_t>(region.buffer_bytes());
  const int64_t rounds = (longest + per_round - 1) / per_round;
  const uint64_t first = region.take_rounds(static_cast<uint64_t>(rounds));
  for (int64_t index = 0; index < rounds; ++index) {
    const uint64_t round = first + static_cast<uint64_t>(index);
    const auto clip = [&](const SpanList& list, int64_t position) { return std::min(list.elements(), position); };
    const SpanList& own = lists[static_cast<size_t>(region.rank())];
    const int64_t begin = index * per_round;
    HVD_TRY(region.await_buffer(round));
    std::byte* buffer = region.buffer(region.rank(), round);
    own.visit(clip(own, begin), clip(own, begin + per_round),
              [&](const std::byte* input, std::byte* output, int64_t count, int64_t offset) {
                std::memcpy(buffer + offset, input, static_cast<size_t>(count));
                copy(output, input, static_cast<size_t>(count));
              });
    region.publish(Phase::posted, round + 1);
    for (int step = 1; step < size; ++step) {
      const int member = (region.rank() + step) % size;
      const SpanList& list = lists[static_cast<size_t>(member)];
      HVD_TRY(region.await(member, Phase::posted, round + 1));
      const std::byte* source = region.buffer(member, round);
      list.visit(clip(list, begin), clip(list, begin + per_round),
                 [&](const std::byte*, std::byte* output, int64_t count, int64_t offset) {
                   copy(output, source + offset, static_cast<size_t>(count));
                 });
    }
    region.publish(Phase::finished, round + 1);
  }
  return {};
}

}  // namespace horovod::shared
