#include "collectives/adasum.h"

#include <algorithm>
#include <bit>
#include <memory>

#include "base/large_memory.h"
#include "collectives/adasum_wire.h"
#include "kernels/adasum.h"
#include "kernels/kernels.h"

namespace horovod {
namespace {

using kernels::DotProducts;
using mesh::Slice;

// Dot products are summed in blocks of so many bytes, which begin where the member's part begins. So the order of the
// sum does not depend on the pieces in which the elements arrive.
constexpr size_t kBlockBytes = 32 << 10;

class Adasum {
 public:
  Adasum(const DataPlane& plane, Batch batch)
      : wire_(AdasumWire::over(plane)),
        rank_(wire_->rank()),
        size_(wire_->size()),
        power_(static_cast<int>(std::bit_floor(static_cast<unsigned>(size_)))),
        spec_(batch[0]->spec),
        dtype_(spec_.tensors[0].dtype),
        item_(size_of(dtype_)),
        inputs_(batch),
        outputs_(SpanList::in_place(batch)),
        mine_(&inputs_) {
    int64_t edge = 0;
    for (const Operation* operation : batch) {
      for (const Span& span : operation->spans) {
        edges_.push_back(edge);
        edge += span.count;
      }
    }
    edges_.push_back(edge);
  }

  Status run() {
    const int64_t total = inputs_.elements();
    if (total == 0) return {};
    if (halves()) HVD_TRY(make_room(folds() ? total : (total + 1) / 2));
    if (spec_.prescale != 1.0) {
      scale(inputs_, {0, total}, spec_.prescale);
      mine_ = &outputs_;
    }
    HVD_TRY(fold({0, total}));
    parts_.reserve(static_cast<size_t>(size_));
    for (int member = 0; member < size_; ++member) parts_.push_back({0, member < power_ ? total : 0});
    for (int distance = 1; distance < power_; distance *= 2) {
      if (distance > 1) combine_all();
      HVD_TRY(halve(distance));
      HVD_TRY(share_products(distance));
    }
    return collect();
  }

 private:
  struct Range {
    int64_t begin;
    int64_t end;
    int64_t size() const { return end - begin; }
  };

  // Members beyond the largest power of two only send their vectors, each to one member that folds them into its own,
  // and get the result.
  bool halves() const { return rank_ < power_; }
  bool folds() const { return rank_ < size_ - power_; }

  Status fold(Range all) {
    if (size_ == power_) return {};
    AdasumWire::Step step{.sent = {mine_, 0, halves() ? 0 : all.end}, .longest = all.end};
    if (!halves()) step.peers = {{rank_ - power_, {&outputs_, 0, 0}}};
    if (folds()) step.peers = {{rank_ + power_, {&room_, 0, all.end}}};
    if (folds()) step.after = expect(all);
    HVD_TRY(wire_->run(step));
    if (!folds()) return {};
    weigh(products_);
    combine_all();
    return {};
  }

  Status halve(int distance) {
    AdasumWire::Step step{.sent = {mine_, 0, 0}};
    std::vector<Range> next(parts_);
    for (int member = 0; member < power_; ++member) {
      next[member] = half(parts_[member], member, distance);
      step.longest = std::max(step.longest, next[member].size());
    }
    if (halves()) {
      const int partner = rank_ ^ distance;  // until now the partner had the same part
      step.sent = {mine_, next[partner].begin, next[partner].end};
      step.peers = {{partner, {&room_, 0, next[rank_].size()}}};
      step.after = expect(next[rank_]);
    }
    parts_ = std::move(next);
    return wire_->run(step);
  }

  // Each member has the dot products of its part; those of whole tensors are the sum over the 2 * distance members that
  // share them.
  Status share_products(int distance) {
    const size_t count = tensors();
    const int sharing = 2 * distance, first = rank_ / sharing * sharing;
    std::vector<DotProducts> all(count * static_cast<size_t>(sharing));
    const auto bytes = static_cast<int64_t>(count * sizeof(DotProducts));
    auto* const memory = reinterpret_cast<std::byte*>(all.data());
    const Span span{memory, memory, bytes * sharing};
    const SpanList list({&span, 1}, DType::uint8);
    if (halves())
      std::copy(products_.begin(), products_.end(), all.data() + count * static_cast<size_t>(rank_ - first));
    if (wire_->is_sparse()) {
      HVD_TRY(double_up(list, bytes, sharing));
    } else {
      AdasumWire::Step step{.sent = {&list, 0, 0}, .longest = bytes};
      if (halves()) {
        const int64_t at = (rank_ - first) * bytes;
        step.sent = {&list, at, at + bytes};
        for (int i = 0; i < sharing; ++i) {
          if (first + i != rank_) step.peers.push_back({first + i, {&list, i * bytes, (i + 1) * bytes}});
        }
      }
      HVD_TRY(wire_->run(step));
    }
    if (!halves()) return {};
    // a is the vector of the side whose rank has no bit of the distance; b is that of the other side.
    std::vector<DotProducts> sums(count);
    for (int i = 0; i < sharing; ++i) {
      const bool same_side = ((first + i) & distance) == (rank_ & distance);
      for (size_t t = 0; t < count; ++t) {
        const DotProducts& part = all[static_cast<size_t>(i) * count + t];
        sums[t].ab += part.ab;
        sums[t].aa += same_side ? part.aa : part.bb;
        sums[t].bb += same_side ? part.bb : part.aa;
      }
    }
    weigh(sums);
    return {};
  }

  // Gives every member of a group of `sharing` the blocks of all of them. At distance 1 two members exchange their
  // blocks, at distance 2 the two blocks that each has then, and so on.
  Status double_up(const SpanList& blocks, int64_t bytes, int sharing) {
    if (!halves()) return {};
    for (int distance = 1; distance < sharing; distance *= 2) {
      const int64_t length = distance * bytes;
      const int64_t mine = rank_ % sharing / distance * length,
                    theirs = (rank_ ^ distance) % sharing / distance * length;
      HVD_TRY(wire_->run({.sent = {&blocks, mine, mine + length},
                          .peers = {{rank_ ^ distance, {&blocks, theirs, theirs + length}}},
                          .longest = length}));
    }
    return {};
  }

  Status collect() { return wire_->is_sparse() ? collect_from_partners() : collect_from_all(); }

  // Undoes the halvings, in reverse order. Then members beyond the largest power of two get the whole result.
  Status collect_from_partners() {
    const Range all{0, inputs_.elements()};
    if (halves()) {
      finish(parts_[rank_]);
      for (int distance = power_ / 2; distance > 0; distance /= 2) {
        const Range mine = part_at(rank_, distance), theirs = part_at(rank_ ^ distance, distance);
        HVD_TRY(wire_->run({.sent = {&outputs_, mine.begin, mine.end},
                            .peers = {{rank_ ^ distance, {&outputs_, theirs.begin, theirs.end}}},
                            .longest = std::max(mine.size(), theirs.size())}));
      }
    }
    AdasumWire::Step step{.sent = {&outputs_, 0, 0}, .longest = all.end};
    if (!halves()) step.peers = {{rank_ - power_, {&outputs_, 0, all.end}}};
    if (folds()) {
      step.sent.end = all.end;
      step.peers = {{rank_ + power_, {&outputs_, 0, 0}}};
    }
    return step.peers.empty() ? Status() : wire_->run(step);
  }

  // Combines this member's part piece by piece while it goes to all others, and takes theirs.
  Status collect_from_all() {
    const Range part = parts_[rank_];
    AdasumWire::Step step{.sent = {&outputs_, part.begin, part.end}};
    for (int i = 1; i < size_; ++i) {
      const int member = (rank_ + i) % size_;
      step.peers.push_back({member, {&outputs_, parts_[member].begin, parts_[member].end}});
    }
    for (const Range& other : parts_) step.longest = std::max(step.longest, other.size());
    step.before = [this](const Slice& piece) { finish({piece.begin, piece.end}); };
    return wire_->run(step);
  }

  // The last combination, for these elements of this member's part.
  void finish(Range elements) {
    combine(elements);
    if (spec_.postscale != 1.0) scale(outputs_, elements, spec_.postscale);
  }

  // The part of the array that `member` has after the halving at this distance.
  Range part_at(int member, int distance) const {
    Range part{0, inputs_.elements()};
    for (int halved = 1; halved <= distance; halved *= 2) part = half(part, member, halved);
    return part;
  }

  // The half of its part that `member` keeps at this distance: the lower half on the side without the bit.
  static Range half(Range part, int member, int distance) {
    const int64_t middle = part.begin + part.size() / 2;
    return (member & distance) == 0 ? Range{part.begin, middle} : Range{middle, part.end};
  }

  // Memory for theirs_. Not from malloc, which may take it from the kernel anew for each operation, page by page.
  Status make_room(int64_t most) {
    const size_t bytes = static_cast<size_t>(most) * item_;
    theirs_.reset(static_cast<std::byte*>(allocate_large(bytes)));
    if (!theirs_) {
      return {Code::internal, error_code::out_of_memory,
              "There is not enough memory for the " + std::to_string(bytes) + " bytes in which " + spec_.name +
                  " is computed."};
    }
    const Span span{theirs_.get(), theirs_.get(), most};
    room_ = SpanList({&span, 1}, dtype_);
    return {};
  }

  // Before another member's elements of `range` come to theirs_: returns the function to call as they come.
  std::function<void(int64_t)> expect(Range range) {
    products_.assign(tensors(), {});
    range_ = range;
    return [this, summed = int64_t{0}](int64_t arrived) mutable {
      const auto block = static_cast<int64_t>(kBlockBytes / item_);
      for (; summed < range_.size() && std::min(summed + block, range_.size()) <= arrived; summed += block) {
        const int64_t begin = range_.begin + summed;
        visit({begin, std::min(begin + block, range_.end)},
              [&](size_t tensor, const std::byte* mine, std::byte*, const std::byte* theirs, size_t count) {
                const DotProducts part = kernels::dot_products(dtype_, mine, theirs, count);
                products_[tensor].ab += part.ab;
                products_[tensor].aa += part.aa;
                products_[tensor].bb += part.bb;
              });
      }
    };
  }

  // A gradient of zeros has no direction and changes nothing.
  void weigh(const std::vector<DotProducts>& products) {
    weights_.clear();
    for (const DotProducts& dot : products) {
      weights_.push_back(
          {dot.aa > 0 ? 1.0 - dot.ab / (2.0 * dot.aa) : 1.0, dot.bb > 0 ? 1.0 - dot.ab / (2.0 * dot.bb) : 1.0});
    }
  }

  // Computes elements of range_: the output becomes the Adasum of mine_ and theirs_.
  void combine(Range elements) {
    visit(elements,
          [&](size_t tensor, const std::byte* mine, std::byte* output, const std::byte* theirs, size_t count) {
            const Weights& weights = weights_[tensor];
            kernels::weighted_sum(dtype_, output, mine, weights.mine, theirs, weights.theirs, count);
          });
  }
  void combine_all() {
    combine(range_);
    mine_ = &outputs_;
  }

  void scale(const SpanList& from, Range elements, double factor) {
    from.visit(elements.begin, elements.end, [&](const std::byte* input, std::byte* output, int64_t count, int64_t) {
      kernels::scale(dtype_, output, input, static_cast<size_t>(count), factor);
    });
  }

  // Calls visit(tensor, mine, output, theirs, count) for each tensor's share of `elements`, which are in range_.
  template <typename Visit>
  void visit(Range elements, Visit&& visit) const {
    const std::byte* const theirs = theirs_.get() + static_cast<size_t>(elements.begin - range_.begin) * item_;
    mine_->visit(elements.begin, elements.end,
                 [&](const std::byte* mine, std::byte* output, int64_t count, int64_t offset) {
                   const auto tensor = std::upper_bound(edges_.begin(), edges_.end(), elements.begin + offset) - 1;
                   visit(static_cast<size_t>(tensor - edges_.begin()), mine, output,
                         theirs + static_cast<size_t>(offset) * item_, static_cast<size_t>(count));
                 });
  }

  size_t tensors() const { return edges_.size() - 1; }

  struct Weights {
    double mine;
    double theirs;
  };

  const std::unique_ptr<AdasumWire> wire_;
  const int rank_;
  const int size_;
  const int power_;
  const OpSpec& spec_;
  const DType dtype_;
  const size_t item_;
  const SpanList inputs_;
  const SpanList outputs_;      // results are at both ends of each span
  const SpanList* mine_;        // its inputs are this member's vector: outputs_ as soon as something was computed
  std::vector<int64_t> edges_;  // first element of each tensor in the virtual array, and its end
  std::vector<Range> parts_;    // by member: the elements of which it has the latest values
  std::unique_ptr<std::byte, decltype(&free_large)> theirs_{nullptr, free_large};  // range_ of another member's vector
  SpanList room_{Batch()};                                                         // all of theirs_
  Range range_{0, 0};
  // Dot products of each tensor, over the elements that have come: mine with theirs, mine, theirs.
  std::vector<DotProducts> products_;
  std::vector<Weights> weights_;  // weights of each tensor
};

}  // namespace

Status adasum(const DataPlane& plane, Batch batch) { return Adasum(plane, batch).run(); }

}  // namespace horovod
