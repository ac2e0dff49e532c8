// Recursive halving over all members (tree.h), whichever hosts they are on: each of log2 n steps, rounded down, halves
// the array between the two members of a pair. At the end a member has its own rows and those of the one that it folds.
//
// The array of the tree has the rows of each member in one place, those of a pair of which one folds the other side by
// side, in the order in which halving leaves them to their members. It is cut into segments, of all members' rows at
// once, which bounds the memory in which sums of other members' rows are computed.
#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>

#include "base/large_memory.h"
#include "collectives/mesh/slices.h"
#include "collectives/sparse/collectives.h"
#include "collectives/sparse/tree.h"

namespace horovod::sparse {
namespace {

using mesh::Slice;

constexpr int64_t kSegmentBytes = 8 << 20;
constexpr int64_t kLeastRun = 64;  // least elements of one member in a segment, unless it has fewer in all

class Scatter {
 public:
  Scatter(Mesh& mesh, std::span<const Slice> slices, const Reduction& reduction)
      : tree_(mesh, all_members(mesh.size()), reduction),
        slices_(slices),
        dtype_(reduction.dtype),
        item_(size_of(reduction.dtype)),
        by_part_(static_cast<size_t>(tree_.power())) {
    for (int place = 0; place < tree_.power(); ++place) by_part_[static_cast<size_t>(tree_.part_of(place))] = place;
  }

  Status run(const std::string& name) {
    int64_t longest = 0, total = 0;
    for (const Slice& slice : slices_) longest = std::max(longest, slice.size());
    const auto members = static_cast<int64_t>(slices_.size());
    const int64_t run = std::max(kSegmentBytes / static_cast<int64_t>(item_) / members, kLeastRun);
    for (const Slice& slice : slices_) total += std::min(run, slice.size());
    if (total == 0) return {};
    room_.reset(static_cast<std::byte*>(allocate_large(static_cast<size_t>(total) * item_)));
    if (!room_) {
      return {Code::internal, error_code::out_of_memory,
              "There is not enough memory for the " + std::to_string(static_cast<size_t>(total) * item_) +
                  " bytes in which " + name + " is computed."};
    }
    for (int64_t begin = 0; begin < longest; begin += run) HVD_TRY(reduce_segment(begin, begin + run));
    return {};
  }

 private:
  static std::vector<int> all_members(int size) {
    std::vector<int> members(static_cast<size_t>(size));
    std::iota(members.begin(), members.end(), 0);
    return members;
  }

  // The part of a member's rows that is in the segment.
  Slice cut(int member, int64_t begin, int64_t end) const {
    const Slice& slice = slices_[static_cast<size_t>(member)];
    return {slice.list, std::min(slice.begin + begin, slice.end), std::min(slice.begin + end, slice.end)};
  }

  Status reduce_segment(int64_t begin, int64_t end) {
    std::vector<Span> spans;
    std::vector<int64_t> bounds{0};
    int64_t elements = 0;
    const auto append = [&](int member) {
      const Slice rows = cut(member, begin, end);
      rows.list->visit(rows.begin, rows.end, [&](const std::byte* input, std::byte*, int64_t count, int64_t) {
        spans.push_back({input, room_.get() + static_cast<size_t>(elements) * item_, count});
        elements += count;
      });
    };
    for (const int member : by_part_) {
      append(member);
      if (member + tree_.power() < tree_.size()) append(member + tree_.power());
      bounds.push_back(elements);
    }
    const SpanList array(spans, dtype_);
    const Span room{room_.get(), room_.get(), elements};
    const SpanList sums({&room, 1}, dtype_);
    HVD_TRY(tree_.begin(array, sums, {0, elements}));
    HVD_TRY(tree_.reduce_parts(bounds));
    return hand_out(sums, bounds, cut(tree_.place(), begin, end));
  }

  // A member's own rows are the first of the part that is left with it; the others belong to the one that it folds.
  Status hand_out(const SpanList& sums, std::span<const int64_t> bounds, const Slice& mine) {
    if (tree_.is_folded()) return tree_.unfold({}, mine);
    const auto part = static_cast<size_t>(tree_.part_of(tree_.place()));
    const std::byte* const result = room_.get() + static_cast<size_t>(bounds[part]) * item_;
    mine.list->visit(mine.begin, mine.end, [&](const std::byte*, std::byte* output, int64_t count, int64_t offset) {
      std::memcpy(output, result + static_cast<size_t>(offset) * item_, static_cast<size_t>(count) * item_);
    });
    return tree_.unfold({&sums, bounds[part] + mine.size(), bounds[part + 1]}, {});
  }

  Tree tree_;
  const std::span<const Slice> slices_;  // by member
  const DType dtype_;
  const size_t item_;
  std::vector<int> by_part_;                                                     // the member that keeps each part
  std::unique_ptr<std::byte, decltype(&free_large)> room_{nullptr, free_large};  // sums of a segment
};

}  // namespace

Status reducescatter(Hierarchy& hierarchy, Batch batch) {
  if (batch.empty() || batch[0]->spec.tensors.empty()) return {};
  Mesh& mesh = *hierarchy.mesh;
  mesh::RowSlices rows;
  HVD_TRY(mesh::slice_rows(batch, mesh.rank(), mesh.size(), rows));
  return Scatter(mesh, rows.slices, Reduction::of(batch[0]->spec, mesh.size())).run(batch[0]->spec.name);
}

}  // namespace horovod::sparse
