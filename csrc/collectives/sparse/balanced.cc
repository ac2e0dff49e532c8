#include "collectives/sparse/balanced.h"

#include <algorithm>
#include <bit>
#include <vector>

#include "kernels/kernels.h"

namespace horovod::sparse {
namespace {

constexpr int64_t kBalancedPieceBytes = 4 << 10;  // the tree's results for a piece stay in the first-level cache

// One piece of the elements. A branch of the tree is finished before the next one is begun, so that no more than one
// result for each level is kept.
class BalancedPiece {
 public:
  BalancedPiece(const Reduction& reduction, const void* const* inputs, int hosts, int64_t first, size_t count,
                std::byte* room)
      : reduction_(reduction),
        inputs_(inputs),
        hosts_(hosts),
        power_(static_cast<int>(std::bit_floor(static_cast<unsigned>(hosts)))),
        first_byte_(static_cast<size_t>(first) * size_of(reduction.dtype)),
        count_(count),
        room_(room) {}

  void run(std::byte* output) {
    if (hosts_ == 1) {
      const void* const only = at(0);
      kernels::reduce(reduction_.dtype, reduction_.op, output, &only, 1, count_, reduction_.postscale);
      return;
    }
    const void* const lower = branch(0, power_ / 2, room_);
    const void* const upper = branch(power_ / 2, power_ / 2, behind(room_));
    combine(output, lower, upper, reduction_.postscale);
  }

 private:
  // The result of hosts [first, first + width), with those that are folded into them: in `room`, or where it is
  // already.
  const void* branch(int first, int width, std::byte* room) {
    if (width == 1) {
      if (first + power_ >= hosts_) return at(first);
      combine(room, at(first), at(first + power_), 1.0);
      return room;
    }
    const void* const lower = branch(first, width / 2, room);
    const void* const upper = branch(first + width / 2, width / 2, behind(room));
    combine(room, lower, upper, 1.0);
    return room;
  }

  void combine(std::byte* output, const void* lower, const void* upper, double postscale) {
    const void* const both[] = {lower, upper};
    kernels::reduce(reduction_.dtype, reduction_.op, output, both, 2, count_, postscale);
  }
  const std::byte* at(int host) const { return static_cast<const std::byte*>(inputs_[host]) + first_byte_; }
  std::byte* behind(std::byte* room) const { return room + count_ * size_of(reduction_.dtype); }

  const Reduction& reduction_;
  const void* const* const inputs_;
  const int hosts_;
  const int power_;
  const size_t first_byte_;
  const size_t count_;
  std::byte* const room_;
};

}  // namespace

void reduce_balanced(const Reduction& reduction, std::byte* output, const void* const* inputs, int hosts,
                     int64_t count) {
  const auto item = static_cast<int64_t>(size_of(reduction.dtype));
  const int64_t piece = std::min(kBalancedPieceBytes / item, count);
  const auto levels = static_cast<size_t>(std::bit_width(static_cast<unsigned>(hosts)));
  std::vector<std::byte> room(levels * static_cast<size_t>(piece * item));
  for (int64_t begin = 0; begin < count; begin += piece) {
    const auto here = static_cast<size_t>(std::min(piece, count - begin));
    BalancedPiece(reduction, inputs, hosts, begin, here, room.data()).run(output + begin * item);
  }
}

}  // namespace horovod::sparse
