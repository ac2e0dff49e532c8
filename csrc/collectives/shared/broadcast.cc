// The root fills its buffers, and the other members copy them out. Rounds overlap as far as there are buffers.
#include <cstring>

#include "collectives/shared/collectives.h"
#include "kernels/copy.h"

namespace horovod::shared {

Status broadcast(Region& region, Batch batch) {
  const SpanList spans(batch);
  const int root = batch[0]->spec.root;
  const int64_t item = static_cast<int64_t>(spans.element_bytes());
  const int64_t per_round = static_cast<int64_t>(region.buffer_bytes()) / item;
  const int64_t total = spans.elements();
  const int64_t rounds = (total + per_round - 1) / per_round;
  const kernels::ResultCopy copy(static_cast<size_t>(total * item));
  const uint64_t first = region.take_rounds(static_cast<uint64_t>(rounds));
  for (int64_t index = 0; index < rounds; ++index) {
    const uint64_t round = first + static_cast<uint64_t>(index);
    const int64_t begin = index * per_round;
    const int64_t end = std::min(total, begin + per_round);
    std::byte* buffer = region.buffer(root, round);
    if (region.rank() == root) {
      HVD_TRY(region.await_buffer(round));
      spans.visit(begin, end, [&](const std::byte* input, std::byte* output, int64_t count, int64_t offset) {
        std::memcpy(buffer + offset * item, input, static_cast<size_t>(count * item));
        if (output && output != input) copy(output, input, static_cast<size_t>(count * item));
      });
      region.publish(Phase::posted, round + 1);
    } else {
      HVD_TRY(region.await(root, Phase::posted, round + 1));
      spans.visit(begin, end, [&](const std::byte*, std::byte* output, int64_t count, int64_t offset) {
        copy(output, buffer + offset * item, static_cast<size_t>(count * item));
      });
    }
    region.publish(Phase::finished, round + 1);
  }
  return {};
}

}  // namespace horovod::shared
