#include "collectives/adasum.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "kernels/adasum.h"
#include "kernels/kernels.h"

namespace horovod {
namespace {

// A step in which every member may exchange bytes with partners. All members take part in every step, if only with
// nothing, and know the largest transfer of the step: rounds of shared memory are counted alike everywhere.
class Wire {
 public:
  Wire(const DataPlane& plane, int rank, int size) : plane_(plane), rank_(rank), size_(size) {}

  // Sends to `partner` and receives from it; -1: nothing in this step.
  Status swap(int partner, const std::byte* send, size_t send_bytes, std::byte* receive, size_t receive_bytes,
              size_t largest) {
    if (plane_.mesh) {
      if (partner < 0) return {};
      const Transfer out{member_of_mesh(partner), {{const_cast<std::byte*>(send), send_bytes}}};
      const Transfer in{member_of_mesh(partner), {{receive, receive_bytes}}};
      return plane_.mesh->exchange({&out, 1}, {&in, 1});
    }
    Region& region = *plane_.region;
    const size_t slot = region.slot_bytes();
    const uint64_t rounds = (largest + slot - 1) / slot;
    const uint64_t first = region.take_rounds(rounds);
    for (uint64_t index = 0; index < rounds; ++index) {
      const uint64_t round = first + index;
      const size_t begin = index * slot;
      HVD_TRY(region.await_slot(round));
      if (partner >= 0 && begin < send_bytes) {
        std::memcpy(region.slot(rank_, round), send + begin, std::min(slot, send_bytes - begin));
      }
      region.publish(Phase::posted, round + 1);
      if (partner >= 0 && begin < receive_bytes) {
        HVD_TRY(region.await(partner, Phase::posted, round + 1));
        std::memcpy(receive + begin, region.slot(partner, round), std::min(slot, receive_bytes - begin));
      }
      region.publish(Phase::finished, round + 1);
    }
    return {};
  }

  // Member m's bytes are all[offsets[m] .. offsets[m + 1]); each member has its own part in place already.
  Status gather(std::byte* all, const std::vector<size_t>& offsets) {
    const auto bytes_of = [&](int member) { return offsets[member + 1] - offsets[member]; };
    if (plane_.mesh) {
      std::vector<Transfer> sends, receives;
      for (int member = 0; member < size_; ++member) {
        if (member == rank_) continue;
        const int peer = member_of_mesh(member);
        if (bytes_of(rank_)) sends.push_back({peer, {{all + offsets[rank_], bytes_of(rank_)}}});
        if (bytes_of(member)) receives.push_back({peer, {{all + offsets[member], bytes_of(member)}}});
      }
      return plane_.mesh->exchange(sends, receives);
    }
    Region& region = *plane_.region;
    const size_t slot = region.slot_bytes();
    size_t largest = 0;
    for (int member = 0; member < size_; ++member) largest = std::max(largest, bytes_of(member));
    const uint64_t rounds = (largest + slot - 1) / slot;
    const uint64_t first = region.take_rounds(rounds);
    for (uint64_t index = 0; index < rounds; ++index) {
      const uint64_t round = first + index;
      const size_t begin = index * slot;
      const auto piece = [&](int member) {
        return begin < bytes_of(member) ? std::min(slot, bytes_of(member) - begin) : 0;
      };
      HVD_TRY(region.await_slot(round));
      if (piece(rank_)) std::memcpy(region.slot(rank_, round), all + offsets[rank_] + begin, piece(rank_));
      region.publish(Phase::posted, round + 1);
      for (int member = 0; member < size_; ++member) {
        if (member == rank_ || piece(member) == 0) continue;
        HVD_TRY(region.await(member, Phase::posted, round + 1));
        std::memcpy(all + offsets[member] + begin, region.slot(member, round), piece(member));
      }
      region.publish(Phase::finished, round + 1);
    }
    return {};
  }

 private:
  int member_of_mesh(int member) const { return plane_.members.empty() ? member : plane_.members[member]; }

  const DataPlane& plane_;
  const int rank_;
  const int size_;
};

class Adasum {
 public:
  Adasum(const DataPlane& plane, int rank, int size, Batch batch)
      : wire_(plane, rank, size),
        rank_(rank),
        size_(size),
        batch_(batch),
        spans_(batch),
        spec_(batch[0]->spec),
        dtype_(spec_.tensors[0].dtype),
        item_(size_of(dtype_)) {}

  Status run() {
    const int64_t total = spans_.elements();
    if (total == 0) return {};
    mine_.resize(static_cast<size_t>(total) * item_);
    theirs_.resize(mine_.size());
    spans_.visit(0, total, [&](const std::byte* input, std::byte*, int64_t count, int64_t offset) {
      if (spec_.prescale == 1.0) {
        std::memcpy(mine_.data() + offset * item_, input, count * item_);
      } else {
        kernels::scale(dtype_, mine_.data() + offset * item_, input, count, spec_.prescale);
      }
    });
    int64_t edge = 0;
    for (const Operation* operation : batch_) {
      for (const Span& span : operation->spans) {
        edges_.push_back(edge);
        edge += span.count;
      }
    }
    edges_.push_back(edge);

    const int power = static_cast<int>(std::bit_floor(static_cast<unsigned>(size_)));
    HVD_TRY(fold(power, total));
    ranges_.assign(static_cast<size_t>(size_), {0, 0});
    for (int member = 0; member < power; ++member) ranges_[member] = {0, total};
    for (int distance = 1; distance < power; distance *= 2) HVD_TRY(halve(power, distance));
    HVD_TRY(collect(power));

    spans_.visit(0, total, [&](const std::byte*, std::byte* output, int64_t count, int64_t offset) {
      kernels::scale(dtype_, output, mine_.data() + offset * item_, count, spec_.postscale);
    });
    return {};
  }

 private:
  struct Range {
    int64_t begin;
    int64_t end;
  };

  // Rank power + i gives its whole vector to rank i.
  Status fold(int power, int64_t total) {
    const int extra = size_ - power;
    if (extra == 0) return {};
    const size_t bytes = static_cast<size_t>(total) * item_;
    if (rank_ >= power) return wire_.swap(rank_ - power, mine_.data(), bytes, nullptr, 0, bytes);
    HVD_TRY(wire_.swap(rank_ < extra ? rank_ + power : -1, nullptr, 0, theirs_.data(), bytes, bytes));
    if (rank_ < extra) combine({0, total}, dots({0, total}));
    return {};
  }

  Status halve(int power, int distance) {
    const bool active = rank_ < power;
    int64_t longest = 0;
    for (int member = 0; member < power; ++member) {
      longest = std::max(longest, (ranges_[member].end - ranges_[member].begin + 1) / 2);
    }
    const int partner = active ? rank_ ^ distance : -1;
    if (active) {
      const Range kept = half(rank_, distance), given = half(partner, distance);
      HVD_TRY(wire_.swap(partner, at(mine_, given.begin), bytes(given), at(theirs_, kept.begin), bytes(kept),
                         static_cast<size_t>(longest) * item_));
    } else {
      HVD_TRY(wire_.swap(-1, nullptr, 0, nullptr, 0, static_cast<size_t>(longest) * item_));
    }
    std::vector<Range> next(ranges_);
    for (int member = 0; member < power; ++member) next[member] = half(member, distance);
    ranges_ = std::move(next);

    // Each member has the dot products of its part; those of whole tensors are the sum over the 2 * distance members
    // that share them. a is the side whose rank lacks the bit of the distance.
    const size_t tensors = edges_.size() - 1;
    std::vector<kernels::DotProducts> all(tensors * static_cast<size_t>(size_));
    if (active) {
      const std::vector<kernels::DotProducts> part = dots(ranges_[rank_]);
      std::copy(part.begin(), part.end(), all.begin() + static_cast<std::ptrdiff_t>(tensors) * rank_);
    }
    std::vector<size_t> offsets;
    for (int member = 0; member <= size_; ++member) {
      offsets.push_back(std::min(member, power) * tensors * sizeof(kernels::DotProducts));
    }
    HVD_TRY(wire_.gather(reinterpret_cast<std::byte*>(all.data()), offsets));
    if (!active) return {};
    std::vector<kernels::DotProducts> sums(tensors);
    const int first = rank_ / (2 * distance) * (2 * distance);
    for (int member = first; member < first + 2 * distance; ++member) {
      // "mine" of an upper member is b, so its own products are exchanged.
      const bool upper = (member & distance) != 0;
      for (size_t t = 0; t < tensors; ++t) {
        const kernels::DotProducts& part = all[static_cast<size_t>(member) * tensors + t];
        sums[t].ab += part.ab;
        sums[t].aa += upper ? part.bb : part.aa;
        sums[t].bb += upper ? part.aa : part.bb;
      }
    }
    if ((rank_ & distance) != 0) {
      for (kernels::DotProducts& sum : sums) std::swap(sum.aa, sum.bb);
    }
    combine(ranges_[rank_], sums);
    return {};
  }

  Status collect(int power) {
    // Halving leaves the parts in bit-reversed order; they are disjoint and cover everything, so each goes to its
    // place.
    std::vector<size_t> offsets(static_cast<size_t>(size_) + 1, 0);
    for (int member = 0; member < size_; ++member) {
      offsets[member + 1] = offsets[member] + (member < power ? bytes(ranges_[member]) : 0);
    }
    if (rank_ < power)
      std::memcpy(theirs_.data() + offsets[rank_], at(mine_, ranges_[rank_].begin), bytes(ranges_[rank_]));
    HVD_TRY(wire_.gather(theirs_.data(), offsets));
    for (int member = 0; member < power; ++member) {
      std::memcpy(at(mine_, ranges_[member].begin), theirs_.data() + offsets[member], bytes(ranges_[member]));
    }
    return {};
  }

  // What `member` keeps of its range at this distance: the lower half on the side without the bit.
  Range half(int member, int distance) const {
    const Range range = ranges_[member];
    const int64_t middle = range.begin + (range.end - range.begin) / 2;
    return (member & distance) == 0 ? Range{range.begin, middle} : Range{middle, range.end};
  }

  template <typename Visit>
  void visit_tensors(Range range, Visit&& visit) const {
    for (size_t t = 0; t + 1 < edges_.size(); ++t) {
      const int64_t begin = std::max(range.begin, edges_[t]);
      const int64_t end = std::min(range.end, edges_[t + 1]);
      if (begin < end) visit(t, begin, static_cast<size_t>(end - begin));
    }
  }

  std::vector<kernels::DotProducts> dots(Range range) {
    std::vector<kernels::DotProducts> result(edges_.size() - 1);
    visit_tensors(range, [&](size_t t, int64_t begin, size_t count) {
      result[t] = kernels::dot_products(dtype_, at(mine_, begin), at(theirs_, begin), count);
    });
    return result;
  }

  // mine = adasum(mine, theirs); a gradient of zeros has no direction and changes nothing.
  void combine(Range range, const std::vector<kernels::DotProducts>& products) {
    visit_tensors(range, [&](size_t t, int64_t begin, size_t count) {
      const kernels::DotProducts& dot = products[t];
      const double x = dot.aa > 0 ? 1.0 - dot.ab / (2.0 * dot.aa) : 1.0;
      const double y = dot.bb > 0 ? 1.0 - dot.ab / (2.0 * dot.bb) : 1.0;
      kernels::weighted_sum(dtype_, at(mine_, begin), at(mine_, begin), x, at(theirs_, begin), y, count);
    });
  }

  std::byte* at(std::vector<std::byte>& memory, int64_t element) const {
    return memory.data() + static_cast<size_t>(element) * item_;
  }
  size_t bytes(Range range) const { return static_cast<size_t>(range.end - range.begin) * item_; }

  Wire wire_;
  const int rank_;
  const int size_;
  const Batch batch_;
  const SpanList spans_;
  const OpSpec& spec_;
  const DType dtype_;
  const size_t item_;
  std::vector<int64_t> edges_;     // first element of each tensor in the virtual array, and its end
  std::vector<std::byte> mine_;    // this member's vector, then its part of the result
  std::vector<std::byte> theirs_;  // the partner's
  std::vector<Range> ranges_;      // which elements each member holds
};

}  // namespace

Status adasum(const DataPlane& plane, Batch batch) {
  if (plane.region) return Adasum(plane, plane.region->rank(), plane.region->size(), batch).run();
  const std::vector<int>& members = plane.members;
  if (members.empty()) return Adasum(plane, plane.mesh->rank(), plane.mesh->size(), batch).run();
  const auto me = std::find(members.begin(), members.end(), plane.mesh->rank());
  return Adasum(plane, static_cast<int>(me - members.begin()), static_cast<int>(members.size()), batch).run();
}

}  // namespace horovod
