// Slices are cut into chunks, and chunk b of every slice makes up block b. A block goes through five steps:
//
//   post     each member copies what others of its host reduce into its staging buffer (prescaled)
//   combine  for each slice one member of each host, the counterpart of the slice's owner, reduces the chunk over its
//            host and sends the result to the owner
//   settle   the owner reduces the hosts' results into its output, in the order of the hosts, and sends them to its
//            counterparts on the other hosts
//   publish  each member copies what it owns and what has come for it into its staging buffer
//   collect  the others of its host copy that out
//
// So every host sends and receives 2 (H - 1) / H of the array for H hosts, from all of its members at once. Steps of
// different blocks overlap: while one block is combined those before it are on the wire. A member that waits for its
// host still moves bytes of the wire (see Region::set_network_progress), so members can't wait for each other in a
// circle: the member that is furthest behind of all finds everything done that it waits for.
#include "collectives/hierarchical/reduce_slices.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "kernels/kernels.h"
#include "transport/packets.h"

namespace horovod::hierarchical {
namespace {

using mesh::Flow;
using mesh::Slice;

// How many blocks are on the wire to their owners while the next one is combined, and how many are on the wire in
// either direction. More blocks would not fill a wire better, and would take more of the caches.
constexpr int64_t kSettleLag = 1;
constexpr int64_t kPublishLag = 2;
constexpr int64_t kLine = 64;  // bytes; members never write the same cache line of a buffer
// A block of all slices together has at most so many bytes, so that staged data stays in the caches. But a chunk is at
// least worth a frame, and at most what fills a wire. Where a slice is larger than kMuchBytes the first and the last
// blocks are small, for the wire idles while the first is combined and while the last is collected: they begin with the
// least chunk and double.
constexpr int64_t kBlockBytes = 16 * packets::kBytes;
constexpr int64_t kLeastChunkBytes = packets::kBytes / 2;
constexpr int64_t kMostChunkBytes = 2 * packets::kBytes;
constexpr int64_t kMuchBytes = 1 << 20;

class Reducer {
 public:
  Reducer(Hierarchy& hierarchy, std::span<const Slice> slices, const Reduction& reduction, Flow flow)
      : mesh_(*hierarchy.mesh),
        region_(hierarchy.region),
        hosts_(hierarchy.hosts),
        buffer_bytes_(static_cast<int64_t>(hierarchy.buffer_bytes)),
        slices_(slices),
        reduction_(reduction),
        flow_(flow),
        item_(static_cast<int64_t>(size_of(reduction.dtype))),
        me_(mesh_.rank()),
        host_(hosts_.host(me_)),
        local_(hosts_.members(host_)) {
    for (int i = 0; i < mesh_.size(); ++i) {  // begins behind this member, so that not all send to one first
      const int owner = (me_ + 1 + i) % mesh_.size();
      if (works_for(owner)) mine_.push_back(owner);
    }
  }

  Status run() {
    Status status = run_blocks();
    // The epoch is over: the mesh must let go of the memory that is freed here.
    if (!status.ok()) (void)mesh_.finish(rest_);
    return status;
  }

 private:
  bool works_for(int owner) const { return hosts_.counterpart(host_, owner) == me_; }
  Slice chunk(int owner, int64_t block) const {
    const Slice& slice = slices_[owner];
    const auto at = [&](int64_t index) {
      return std::min(slice.begin + bounds_[static_cast<size_t>(index)], slice.end);
    };
    return {slice.list, at(block), at(block + 1)};
  }
  size_t bytes(const Slice& slice) const { return static_cast<size_t>(slice.size() * item_); }
  bool gathers() const { return flow_ == Flow::scatter_gather; }
  // Memory for this host's result for mine_[index], and for another host's result for this member's own slice. Where
  // results are gathered, the former is where the owner's result will be, which comes after the owner has this one.
  std::byte* combined(int64_t block, size_t index) const {
    return scratch(block, static_cast<size_t>(hosts_.count()) + index);
  }
  std::byte* own_sum(int64_t block, size_t index, std::byte* result, int64_t offset) const {
    return gathers() ? result : combined(block, index) + offset * item_;
  }
  std::byte* arrived(int64_t block, int host) const { return scratch(block, static_cast<size_t>(host)); }
  size_t places() const { return static_cast<size_t>(hosts_.count()) + (gathers() ? 0 : mine_.size()); }
  std::byte* scratch(int64_t block, size_t index) const {
    const size_t place = static_cast<size_t>(block % (kSettleLag + 1)) * places() + index;
    return scratch_.get() + place * static_cast<size_t>(chunk_ * item_);
  }
  std::byte* in_buffer(int place, uint64_t round, int owner) const {
    return region_->wide_buffer(place, round) + owner * chunk_ * item_;
  }

  void cut(int64_t longest);
  Status run_blocks();
  Status post(int64_t block);
  Status combine(int64_t block);
  void combine_chunk(int64_t block, size_t index);
  Status settle(int64_t block);
  Status publish(int64_t block);
  Status collect(int64_t block);

  Mesh& mesh_;
  Region* const region_;
  const Hosts& hosts_;
  const int64_t buffer_bytes_;
  const std::span<const Slice> slices_;
  const Reduction reduction_;
  const Flow flow_;
  const int64_t item_;
  const int me_;
  const int host_;
  const std::vector<int>& local_;  // the members of this host; places in it are ranks in the region
  std::vector<int> mine_;          // owners of the slices that this member works for
  std::vector<int64_t> bounds_;    // where in a slice blocks begin, and where the last one ends; elements
  int64_t chunk_ = 0;              // elements of the largest chunk
  std::unique_ptr<std::byte[]> scratch_;
  std::vector<const void*> inputs_;                                     // arguments of the kernel
  uint64_t posted_ = 0;                                                 // round of the last post
  uint64_t published_ = 0;                                              // round of the last publish
  std::vector<Flight> arrivals_ = std::vector<Flight>(kSettleLag + 1);  // hosts' results for this member's slice
  std::vector<Flight> sends_ = std::vector<Flight>(kSettleLag + 1);     // transfers that combined() has started
  std::vector<Flight> gathers_ = std::vector<Flight>(kPublishLag + 1);  // other owners' results
  Flight rest_;
};

// Cuts the slices into blocks. Depends only on what all members have agreed on, so all of them cut alike.
void Reducer::cut(int64_t longest) {
  const int64_t line = kLine / item_;
  const int64_t fitting = buffer_bytes_ / mesh_.size() / kLine * kLine;
  const int64_t wanted = std::clamp(kBlockBytes / mesh_.size() / kLine * kLine, kLeastChunkBytes, kMostChunkBytes);
  const int64_t most_bytes = std::min(fitting, packets::whole(wanted));
  const int64_t most = most_bytes / item_;
  std::vector<int64_t> ends;  // sizes of the small blocks at the beginning; those at the end are the same, reversed
  int64_t middle = longest;
  if (longest * item_ > kMuchBytes) {
    for (int64_t size = kLeastChunkBytes / item_; size < most && 2 * size + most <= middle; size *= 2) {
      ends.push_back(size);
      middle -= 2 * size;
    }
  }
  const int64_t whole = most / line * line;
  const int64_t count = packets::chunk_count(middle * item_, whole * item_, fitting);
  bounds_ = {0};
  for (const int64_t size : ends) bounds_.push_back(bounds_.back() + size);
  for (int64_t i = 1; i < count; ++i) bounds_.push_back(bounds_.back() + whole);
  const int64_t last = middle - (count - 1) * whole;
  bounds_.push_back(bounds_.back() + last);
  chunk_ = std::max(count > 1 ? whole : 0, (last + line - 1) / line * line);
  std::reverse(ends.begin(), ends.end());
  for (const int64_t size : ends) bounds_.push_back(bounds_.back() + size);
  for (const int64_t size : ends) chunk_ = std::max(chunk_, size);
}

Status Reducer::run_blocks() {
  int64_t longest = 0;
  for (const Slice& slice : slices_) longest = std::max(longest, slice.size());
  if (longest == 0) return {};
  cut(longest);
  const int64_t blocks = std::ssize(bounds_) - 1;
  const auto depth = static_cast<size_t>(std::min(blocks, kSettleLag + 1));
  scratch_.reset(new (std::nothrow) std::byte[depth * places() * static_cast<size_t>(chunk_ * item_)]);
  if (!scratch_)
    return {Code::internal, error_code::out_of_memory, "There is not enough memory for a reduction's scratch space."};
  const auto exists = [&](int64_t block) { return block >= 0 && block < blocks; };
  const int64_t steps = blocks + (gathers() ? kPublishLag + 1 : kSettleLag);
  for (int64_t step = 0; step < steps; ++step) {
    if (exists(step)) HVD_TRY(post(step));
    if (gathers() && exists(step - kPublishLag - 1)) HVD_TRY(collect(step - kPublishLag - 1));
    if (exists(step)) HVD_TRY(combine(step));
    if (exists(step - kSettleLag)) HVD_TRY(settle(step - kSettleLag));
    if (gathers() && exists(step - kPublishLag)) HVD_TRY(publish(step - kPublishLag));
  }
  for (Flight& sent : sends_) HVD_TRY(mesh_.finish(sent));
  return mesh_.finish(rest_);
}

Status Reducer::post(int64_t block) {
  if (!region_) return {};
  posted_ = region_->take_rounds(1);
  HVD_TRY(region_->await_wide_buffer(posted_));
  const bool scaled = reduction_.prescale != 1.0 && reduction_.dtype != DType::boolean;
  for (int i = 0; i < mesh_.size(); ++i) {
    const int owner = (me_ + 1 + i) % mesh_.size();
    if (works_for(owner)) continue;
    const Slice slice = chunk(owner, block);
    std::byte* place = in_buffer(region_->rank(), posted_, owner);
    slice.list->visit(slice.begin, slice.end, [&](const std::byte* input, std::byte*, int64_t count, int64_t offset) {
      if (scaled) {
        kernels::scale(reduction_.dtype, place + offset * item_, input, static_cast<size_t>(count),
                       reduction_.prescale);
      } else {
        std::memcpy(place + offset * item_, input, static_cast<size_t>(count * item_));
      }
    });
  }
  region_->publish(Phase::posted, posted_ + 1);
  return {};
}

Status Reducer::combine(int64_t block) {
  const auto turn = static_cast<size_t>(block % (kSettleLag + 1));
  HVD_TRY(mesh_.finish(sends_[turn]));  // the memory that this flight sends is used again below
  const Slice own = chunk(me_, block);
  std::vector<Transfer> receives;
  for (int host = 0; host < hosts_.count(); ++host) {
    if (host != host_) receives.push_back({hosts_.counterpart(host, me_), {{arrived(block, host), bytes(own)}}});
  }
  HVD_TRY(mesh_.start({}, receives, arrivals_[turn]));
  if (region_) HVD_TRY(region_->await(Phase::posted, posted_ + 1));
  for (size_t index = 0; index < mine_.size(); ++index) {
    combine_chunk(block, index);
    if (hosts_.host(mine_[index]) == host_) continue;
    const Slice theirs = chunk(mine_[index], block);
    Transfer send{mine_[index], {}};
    if (gathers()) {
      theirs.list->outputs(theirs.begin, theirs.end, send.pieces);
    } else {
      send.pieces.push_back({combined(block, index), bytes(theirs)});
    }
    HVD_TRY(mesh_.start({&send, 1}, {}, gathers() ? rest_ : sends_[turn]));
  }
  if (region_) region_->publish(Phase::finished, posted_ + 1);
  return {};
}

// Reduces what all members of this host contribute to a chunk, in rank order, and rounds it: so it does not matter
// which member computes it.
void Reducer::combine_chunk(int64_t block, size_t index) {
  const int owner = mine_[index];
  const Slice slice = chunk(owner, block);
  const bool scaled = reduction_.prescale != 1.0 && reduction_.dtype != DType::boolean;
  inputs_.resize(local_.size());
  slice.list->visit(
      slice.begin, slice.end, [&](const std::byte* input, std::byte* result, int64_t count, int64_t offset) {
        std::byte* output = own_sum(block, index, result, offset);
        for (size_t place = 0; place < local_.size(); ++place) {
          if (local_[place] != me_) {
            inputs_[place] = in_buffer(static_cast<int>(place), posted_, owner) + offset * item_;
          } else if (scaled) {
            kernels::scale(reduction_.dtype, output, input, static_cast<size_t>(count), reduction_.prescale);
            inputs_[place] = output;
          } else {
            inputs_[place] = input;
          }
        }
        kernels::reduce(reduction_.dtype, reduction_.op, output, inputs_.data(), static_cast<int>(inputs_.size()),
                        static_cast<size_t>(count), 1.0);
      });
}

Status Reducer::settle(int64_t block) {
  HVD_TRY(mesh_.finish(arrivals_[static_cast<size_t>(block % (kSettleLag + 1))]));
  const size_t own = static_cast<size_t>(std::find(mine_.begin(), mine_.end(), me_) - mine_.begin());
  const Slice slice = chunk(me_, block);
  inputs_.resize(static_cast<size_t>(hosts_.count()));
  slice.list->visit(slice.begin, slice.end, [&](const std::byte*, std::byte* output, int64_t count, int64_t offset) {
    for (int host = 0; host < hosts_.count(); ++host) {
      inputs_[static_cast<size_t>(host)] =
          host == host_ ? own_sum(block, own, output, offset) : arrived(block, host) + offset * item_;
    }
    kernels::reduce(reduction_.dtype, reduction_.op, output, inputs_.data(), hosts_.count(), static_cast<size_t>(count),
                    reduction_.postscale);
  });
  if (!gathers()) return {};
  std::vector<Transfer> sends, receives;
  for (int i = 1; i < hosts_.count(); ++i) {
    const int host = (host_ + i) % hosts_.count();
    slice.list->outputs(slice.begin, slice.end, sends.emplace_back(Transfer{hosts_.counterpart(host, me_), {}}).pieces);
  }
  for (const int owner : mine_) {
    if (hosts_.host(owner) == host_) continue;
    const Slice theirs = chunk(owner, block);
    theirs.list->outputs(theirs.begin, theirs.end, receives.emplace_back(Transfer{owner, {}}).pieces);
  }
  // The owner's result overwrites no data that is still needed: it comes after the owner has received the sum of that.
  HVD_TRY(mesh_.start({}, receives, gathers_[static_cast<size_t>(block % (kPublishLag + 1))]));
  return mesh_.start(sends, {}, rest_);
}

Status Reducer::publish(int64_t block) {
  HVD_TRY(mesh_.finish(gathers_[static_cast<size_t>(block % (kPublishLag + 1))]));
  if (!region_) return {};
  published_ = region_->take_rounds(1);
  HVD_TRY(region_->await_wide_buffer(published_));
  for (const int owner : mine_) {
    const Slice slice = chunk(owner, block);
    std::byte* place = in_buffer(region_->rank(), published_, owner);
    slice.list->visit(slice.begin, slice.end, [&](const std::byte*, std::byte* output, int64_t count, int64_t offset) {
      std::memcpy(place + offset * item_, output, static_cast<size_t>(count * item_));
    });
  }
  region_->publish(Phase::posted, published_ + 1);
  return {};
}

Status Reducer::collect(int64_t block) {
  if (!region_) return {};
  for (size_t step = 1; step < local_.size(); ++step) {
    const int place = static_cast<int>((static_cast<size_t>(region_->rank()) + step) % local_.size());
    HVD_TRY(region_->await(place, Phase::posted, published_ + 1));
    for (int owner = 0; owner < mesh_.size(); ++owner) {
      if (hosts_.counterpart(host_, owner) != local_[static_cast<size_t>(place)]) continue;
      const Slice slice = chunk(owner, block);
      const std::byte* result = in_buffer(place, published_, owner);
      slice.list->visit(slice.begin, slice.end,
                        [&](const std::byte*, std::byte* output, int64_t count, int64_t offset) {
                          std::memcpy(output, result + offset * item_, static_cast<size_t>(count * item_));
                        });
    }
  }
  region_->publish(Phase::finished, published_ + 1);
  return {};
}

}  // namespace

bool fits(const Hierarchy& hierarchy) {
  return hierarchy.buffer_bytes >= static_cast<size_t>(hierarchy.mesh->size()) * kLine;
}

Status reduce_slices(Hierarchy& hierarchy, std::span<const Slice> slices, const Reduction& reduction, Flow flow) {
  return Reducer(hierarchy, slices, reduction, flow).run();
}

}  // namespace horovod::hierarchical
