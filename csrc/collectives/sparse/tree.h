// The reduction that allreduce and reducescatter over a sparse mesh use. It follows the tree of balanced.h: each of its
// pairs is an exchange between two members whose places in a circle differ by a power of two, so they are partners.
//
// With p the largest power of two up to the number of members: members from p on hand their elements to the member p
// places before them (fold), which speaks for both, and get their result from it (unfold). In between, at distances
// 1, 2, ..., p / 2,
//
//   small arrays   two members exchange all they have and both reduce it: log2 p steps (recursive doubling)
//   large ones     they exchange the halves that the other one keeps; where everybody needs the sum, the same
//                  distances backwards give the halves back: 2 log2 p steps, 2 B (p - 1) / p bytes (Rabenseifner,
//                  "Optimization of collective reduction operations", 2004)
//
// All of them reduce the same pairs, so the bits are the same. Elements go in pieces of which a few are on the wire
// while one that has arrived is reduced; scratch memory is for those pieces alone.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "collectives/batch.h"
#include "collectives/mesh/reduce_slices.h"
#include "transport/mesh.h"

namespace horovod::sparse {

// Elements of a virtual array.
struct Range {
  int64_t begin;
  int64_t end;

  int64_t size() const { return end - begin; }
};

class Tree {
 public:
  // members: of the mesh, this one among them, in the order of the tree; at least two.
  Tree(Mesh& mesh, std::vector<int> members, const Reduction& reduction);

  int place() const { return place_; }
  int size() const { return static_cast<int>(members_.size()); }
  int power() const { return power_; }
  bool folds() const { return place_ + power_ < size(); }  // whether this member speaks for another one, too
  bool is_folded() const { return place_ >= power_; }

  // The part of a halved array that is left with the member at `place` < p, counted from the beginning of the array.
  int part_of(int place) const;

  // Where this member's elements are (inputs of `array`), and where their sums go (its outputs). sums: the same outputs
  // as both. `range` is what will be reduced; it is prescaled here. Both lists must outlive what is done with them.
  Status begin(const SpanList& array, const SpanList& sums, Range range);

  // Every member has the sum of `range` at the end.
  Status reduce_all(Range range);
  // The sum of the part of the array [bounds[i], bounds[i + 1]) is left with one of the first p members, see part_of().
  // The others have none. bounds: p + 1 of them.
  Status reduce_parts(std::span<const int64_t> bounds);
  // A member that folds gives `mine` to the one that it speaks for, which puts it to `theirs`.
  Status unfold(const mesh::Slice& mine, const mesh::Slice& theirs);

 private:
  bool is_small(int64_t elements) const;
  Status fold(Range range);
  Status double_up(Range range);
  Status halve(std::span<const int64_t> bounds);
  Status gather(std::span<const int64_t> bounds);
  Status exchange_and_reduce(int other, Range sent, Range reduced, double postscale);
  void reduce(int other, Range piece, const std::byte* arrived, double postscale);
  double postscale_at(int distance) const { return 2 * distance == power_ ? reduction_.postscale : 1.0; }

  Mesh& mesh_;
  const std::vector<int> members_;
  const int place_;
  const int power_;
  const Reduction reduction_;
  const int64_t item_;
  const SpanList* mine_ = nullptr;  // its inputs are this member's elements: sums_ as soon as a sum was computed
  const SpanList* sums_ = nullptr;
  std::unique_ptr<std::byte[]> scratch_;  // pieces on the wire to this member
  int64_t scratch_bytes_ = 0;
};

}  // namespace horovod::sparse
