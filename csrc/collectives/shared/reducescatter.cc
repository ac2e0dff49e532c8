// Part d of a member's buffer holds its contribution to member d's rows. Each member reduces its rows, in rank order.
#include <cstring>

#include "collectives/rows.h"
#include "collectives/shared/collectives.h"
#include "kernels/kernels.h"

namespace horovod::shared {

Status reducescatter(Region& region, Batch batch) {
  const int size = region.size();
  const int rank = region.rank();
  const Reduction reduction = Reduction::of(batch[0]->spec, size);
  const int64_t item = static_cast<int64_t>(size_of(reduction.dtype));

  // streams[d]: the elements that member d gets, as a virtual array over all tensors of the batch.
  std::vector<std::vector<Span>> streams(static_cast<size_t>(size));
  for (Operation* operation : batch) {
    operation->outputs.resize(operation->spans.size());
    for (size_t i = 0; i < operation->spans.size(); ++i) {
      const TensorSpec& tensor = operation->spec.tensors[i];
      const int64_t row_elements = tensor.row_elements();
      for (int member = 0; member < size; ++member) {
        const RowRange range = split_rows(tensor.rows(), size, member);
        std::byte* target = nullptr;
        if (member == rank) {
          HVD_TRY(make_rows(*operation, i, range.count));
          target = operation->outputs[i].data.get();
        }
        streams[static_cast<size_t>(member)].push_back(
            {operation->spans[i].input + range.first * row_elements * item, target, range.count * row_elements});
      }
    }
  }
  std::vector<SpanList> lists;
  int64_t longest = 0;
  for (const std::vector<Span>& stream : streams) {
    lists.emplace_back(stream, reduction.dtype);
    longest = std::max(longest, lists.back().elements());
  }

  const int64_t part = static_cast<int64_t>(region.buffer_bytes()) / size / 64 * 64 / item;
  const int64_t rounds = (longest + part - 1) / part;
  const uint64_t first = region.take_rounds(static_cast<uint64_t>(rounds));
  std::vector<const void*> inputs(static_cast<size_t>(size));
  for (int64_t index = 0; index < rounds; ++index) {
    const uint64_t round = first + static_cast<uint64_t>(index);
    const int64_t begin = index * part;
    HVD_TRY(region.await_buffer(round));
    // This member's own part is staged too: the reduction may then write its output in one pass whatever the layout.
    for (int to = 0; to < size; ++to) {
      const SpanList& list = lists[static_cast<size_t>(to)];
      std::byte* buffer = region.buffer(rank, round) + to * part * item;
      list.visit(std::min(list.elements(), begin), std::min(list.elements(), begin + part),
                 [&](const std::byte* input, std::byte*, int64_t count, int64_t offset) {
                   if (reduction.prescale == 1.0) {
                     std::memcpy(buffer + offset * item, input, static_cast<size_t>(count * item));
                   } else {
                     kernels::scale(reduction.dtype, buffer + offset * item, input, static_cast<size_t>(count),
                                    reduction.prescale);
                   }
                 });
    }
    region.publish(Phase::posted, round + 1);
    HVD_TRY(region.await(Phase::posted, round + 1));
    const SpanList& own = lists[static_cast<size_t>(rank)];
    own.visit(std::min(own.elements(), begin), std::min(own.elements(), begin + part),
              [&](const std::byte*, std::byte* output, int64_t count, int64_t offset) {
                for (int member = 0; member < size; ++member) {
                  inputs[static_cast<size_t>(member)] = region.buffer(member, round) + (rank * part + offset) * item;
                }
                kernels::reduce(reduction.dtype, reduction.op, output, inputs.data(), size, static_cast<size_t>(count),
                                reduction.postscale);
              });
    region.publish(Phase::finished, round + 1);
  }
  return {};
}

}  // namespace horovod::shared
