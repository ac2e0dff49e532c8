// Reduces within each host through shared memory. Then the members with the same place on their hosts, a rail, sum a
// part of the array (tree.h). Then each part goes to the other members of the host, through shared memory again.
//
// Of n = H L members on H hosts, each host sends 2 B (p - 1) / p bytes in this way, from L members at once. A host
// without shared memory has one member, and so there is one rail.
#include <algorithm>
#include <cstring>

#include "collectives/mesh/slices.h"
#include "collectives/partners.h"
#include "collectives/shared/collectives.h"
#include "collectives/sparse/collectives.h"
#include "collectives/sparse/tree.h"

namespace horovod::sparse {
namespace {

using mesh::Slice;

constexpr int64_t kBufferAlignment = 64;  // elements

Status reduce_on_rail(Hierarchy& hierarchy, size_t place, const SpanList& array, const SpanList& sums,
                      const Slice& part, const Reduction& reduction) {
  std::vector<int> rail;
  for (int host = 0; host < hierarchy.hosts.count(); ++host) rail.push_back(hierarchy.hosts.members(host)[place]);
  Tree tree(*hierarchy.mesh, std::move(rail), reduction);
  const Range range{part.begin, part.end};
  HVD_TRY(tree.begin(array, sums, range));
  return tree.reduce_all(range);
}

// The members at the first places have one part each of the result; every member of the host gets all of it. Part by
// part in blocks of a buffer: while the others copy out a block, its owner fills its next buffer.
Status gather_parts(Region& region, const SpanList& sums, std::span<const Slice> parts) {
  const auto item = static_cast<int64_t>(sums.element_bytes());
  const int64_t block = static_cast<int64_t>(region.buffer_bytes()) / item / kBufferAlignment * kBufferAlignment;
  const auto me = static_cast<size_t>(region.rank());
  const int64_t blocks = (parts[0].size() + block - 1) / block;  // the first part is the longest
  const auto piece = [&](size_t owner, int64_t index) {
    const Slice& part = parts[owner];
    const int64_t begin = std::min(part.begin + index * block, part.end);
    return Range{begin, std::min(begin + block, part.end)};
  };
  const auto post = [&](int64_t index, uint64_t round) -> Status {
    if (me >= parts.size()) return {};
    const Range mine = piece(me, index);
    if (mine.size() == 0) return {};
    HVD_TRY(region.await_buffer(round));
    std::byte* const buffer = region.buffer(region.rank(), round);
    sums.visit(mine.begin, mine.end, [&](const std::byte* result, std::byte*, int64_t count, int64_t offset) {
      std::memcpy(buffer + offset * item, result, static_cast<size_t>(count * item));
    });
    region.publish(Phase::posted, round + 1);
    return {};
  };
  const auto collect = [&](int64_t index, uint64_t round) -> Status {
    for (size_t i = 0; i < parts.size(); ++i) {
      const size_t owner = (me + 1 + i) % parts.size();  // so that not all members read the same buffer first
      const Range theirs = piece(owner, index);
      if (owner == me || theirs.size() == 0) continue;
      HVD_TRY(region.await(static_cast<int>(owner), Phase::posted, round + 1));
      const std::byte* const buffer = region.buffer(static_cast<int>(owner), round);
      sums.visit(theirs.begin, theirs.end, [&](const std::byte*, std::byte* output, int64_t count, int64_t offset) {
        std::memcpy(output, buffer + offset * item, static_cast<size_t>(count * item));
      });
    }
    region.publish(Phase::finished, round + 1);
    return {};
  };
  const uint64_t first = region.take_rounds(static_cast<uint64_t>(blocks));
  for (int64_t step = 0; step <= blocks; ++step) {
    if (step < blocks) HVD_TRY(post(step, first + static_cast<uint64_t>(step)));
    if (step > 0) HVD_TRY(collect(step - 1, first + static_cast<uint64_t>(step) - 1));
  }
  return {};
}

}  // namespace

Status allreduce(Hierarchy& hierarchy, Batch batch) {
  if (batch.empty() || batch[0]->spec.tensors.empty()) return {};
  const SpanList inputs(batch);
  if (inputs.elements() == 0) return {};
  const SpanList sums = SpanList::in_place(batch);
  Reduction reduction = Reduction::of(batch[0]->spec, hierarchy.mesh->size());
  const SpanList* array = &inputs;
  if (hierarchy.region) {
    Reduction within = reduction;
    within.postscale = 1.0;
    HVD_TRY(shared::allreduce(*hierarchy.region, batch, within));
    reduction.prescale = 1.0;  // the elements are prescaled by now
    array = &sums;
  }
  const std::vector<Slice> parts = mesh::equal_slices(sums, rail_count(hierarchy.hosts));
  const size_t place = hierarchy.region ? static_cast<size_t>(hierarchy.region->rank()) : 0;
  if (place < parts.size() && parts[place].size() > 0) {
    HVD_TRY(reduce_on_rail(hierarchy, place, *array, sums, parts[place], reduction));
  }
  return hierarchy.region ? gather_parts(*hierarchy.region, sums, parts) : Status();
}

}  // namespace horovod::sparse
