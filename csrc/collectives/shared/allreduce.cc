// Direct reduce-scatter and all-gather through staging buffers.
//
// A round covers a block of the batch's virtual array, cut into one slice for each member:
//   posted    each member copied its foreign slices into its buffer (prescaled);
//   reduced   each member reduced its own slice over all members in rank order, straight from the peers' buffers into
//             its output, and left the result in its buffer;
//   finished  each member copied the other results out.
// Rounds overlap: while peers catch up with one phase a member works on the next round's copies. The buffers stay in
// the processors' caches, so a member moves 2 B of main memory for B bytes reduced: its input in, its output out.
//
// A batch that fits into one buffer whole skips the second phase: each member reads the data of all members and
// reduces all of it, which takes one synchronisation instead of two.
#include <cstring>

#include "collectives/shared/collectives.h"
#include "kernels/kernels.h"

namespace horovod::shared {
namespace {

constexpr int64_t kPieceBytes = 16 << 10;  // a reduced piece is still in the first-level cache when it is copied on
constexpr size_t kWholeBytes = 32 << 10;   // up to this size each member reduces everything

class Allreduce {
 public:
  Allreduce(Region& region, Batch batch, const Reduction& reduction)
      : region_(region),
        spans_(batch),
        reduction_(reduction),
        item_(static_cast<int64_t>(spans_.element_bytes())),
        rank_(region.rank()),
        size_(region.size()),
        total_(spans_.elements()) {}

  Status run() {
    if (total_ == 0) return {};
    if (static_cast<size_t>(total_ * item_) <= std::min(kWholeBytes, region_.buffer_bytes())) return run_whole();
    return run_sliced();
  }

 private:
  // Copies user elements [begin, end) to `target`, prescaled.
  void copy_in(int64_t begin, int64_t end, std::byte* target) {
    spans_.visit(begin, end, [&](const std::byte* input, std::byte*, int64_t count, int64_t offset) {
      load(target + offset * item_, input, count);
    });
  }
  void load(std::byte* target, const std::byte* input, int64_t count) {
    if (reduction_.prescale == 1.0) {
      std::memcpy(target, input, static_cast<size_t>(count * item_));
    } else {
      kernels::scale(reduction_.dtype, target, input, static_cast<size_t>(count), reduction_.prescale);
    }
  }

  Status run_whole() {
    const uint64_t round = region_.take_rounds(1);
    HVD_TRY(region_.await_buffer(round));
    copy_in(0, total_, region_.buffer(rank_, round));
    region_.publish(Phase::posted, round + 1);
    HVD_TRY(region_.await(Phase::posted, round + 1));
    spans_.visit(0, total_, [&](const std::byte*, std::byte* output, int64_t count, int64_t offset) {
      reduce_from(round, offset * item_, nullptr, output, count);
    });
    region_.publish(Phase::finished, round + 1);
    return {};
  }

  // output = all members' elements at byte `at` of their buffers, in rank order; `own` replaces this member's buffer.
  void reduce_from(uint64_t round, int64_t at, const std::byte* own, std::byte* output, int64_t count) {
    inputs_.resize(size_);
    for (int member = 0; member < size_; ++member) inputs_[member] = region_.buffer(member, round) + at;
    if (own) inputs_[rank_] = own;
    kernels::reduce(reduction_.dtype, reduction_.op, output, inputs_.data(), size_, static_cast<size_t>(count),
                    reduction_.postscale);
  }

  Status run_sliced() {
    // Slices begin on cache lines, so members never write the same line.
    const int64_t line = 64 / item_;
    const int64_t capacity = static_cast<int64_t>(region_.buffer_bytes()) / item_ / size_ / line * line * size_;
    const int64_t rounds = (total_ + capacity - 1) / capacity;
    // All blocks are equal, instead of full blocks and a small rest.
    const int64_t per_slice = ((total_ + rounds - 1) / rounds + size_ - 1) / size_;
    slice_ = std::min(capacity / size_, (per_slice + line - 1) / line * line);
    block_ = slice_ * size_;
    const int64_t needed = (total_ + block_ - 1) / block_;
    first_ = region_.take_rounds(static_cast<uint64_t>(needed));
    const int64_t ahead = region_.buffer_count() >= 3 ? 1 : 0;
    for (int64_t step = 0; step < needed + 1 + ahead; ++step) {
      if (step < needed) HVD_TRY(post(step));
      if (step >= ahead && step - ahead < needed) HVD_TRY(reduce(step - ahead));
      if (step >= ahead + 1) HVD_TRY(collect(step - ahead - 1));
    }
    return {};
  }

  int64_t slice_begin(int64_t index, int member) const { return std::min(total_, index * block_ + member * slice_); }
  int64_t slice_end(int64_t index, int member) const {
    return std::min(total_, index * block_ + (member + 1) * slice_);
  }

  Status post(int64_t index) {
    const uint64_t round = first_ + static_cast<uint64_t>(index);
    HVD_TRY(region_.await_buffer(round));
    std::byte* buffer = region_.buffer(rank_, round);
    for (int step = 1; step < size_; ++step) {
      const int member = (rank_ + step) % size_;
      copy_in(slice_begin(index, member), slice_end(index, member), buffer + member * slice_ * item_);
    }
    region_.publish(Phase::posted, round + 1);
    return {};
  }

  Status reduce(int64_t index) {
    const uint64_t round = first_ + static_cast<uint64_t>(index);
    HVD_TRY(region_.await(Phase::posted, round + 1));
    const int64_t in_buffer = rank_ * slice_ * item_;
    std::byte* result = region_.buffer(rank_, round) + in_buffer;
    const int64_t piece = kPieceBytes / item_;
    spans_.visit(slice_begin(index, rank_), slice_end(index, rank_),
                 [&](const std::byte* input, std::byte* output, int64_t count, int64_t offset) {
                   for (int64_t at = 0; at < count; at += piece) {
                     const int64_t n = std::min(piece, count - at);
                     const std::byte* own = input + at * item_;
                     if (reduction_.prescale != 1.0) {  // the buffer's own slice is free until the result goes there
                       std::byte* scaled = result + (offset + at) * item_;
                       kernels::scale(reduction_.dtype, scaled, own, static_cast<size_t>(n), reduction_.prescale);
                       own = scaled;
                     }
                     reduce_from(round, in_buffer + (offset + at) * item_, own, output + at * item_, n);
                     std::memcpy(result + (offset + at) * item_, output + at * item_, static_cast<size_t>(n * item_));
                   }
                 });
    region_.publish(Phase::reduced, round + 1);
    return {};
  }

  Status collect(int64_t index) {
    const uint64_t round = first_ + static_cast<uint64_t>(index);
    for (int step = 1; step < size_; ++step) {
      const int member = (rank_ + step) % size_;
      HVD_TRY(region_.await(member, Phase::reduced, round + 1));
      const std::byte* result = region_.buffer(member, round) + member * slice_ * item_;
      spans_.visit(slice_begin(index, member), slice_end(index, member),
                   [&](const std::byte*, std::byte* output, int64_t count, int64_t offset) {
                     std::memcpy(output, result + offset * item_, static_cast<size_t>(count * item_));
                   });
    }
    region_.publish(Phase::finished, round + 1);
    return {};
  }

  Region& region_;
  const SpanList spans_;
  const Reduction reduction_;
  const int64_t item_;
  const int rank_;
  const int size_;
  const int64_t total_;
  int64_t slice_ = 0;
  int64_t block_ = 0;
  uint64_t first_ = 0;
  std::vector<const void*> inputs_;
};

}  // namespace

Status allreduce(Region& region, Batch batch) {
  return allreduce(region, batch, Reduction::of(batch[0]->spec, region.size()));
}

Status allreduce(Region& region, Batch batch, const Reduction& reduction) {
  return Allreduce(region, batch, reduction).run();
}

}  // namespace horovod::shared
