#include "collectives/mesh/reduce_slices.h"

#include <algorithm>
#include <array>

#include "kernels/kernels.h"
#include "transport/packets.h"

namespace horovod::mesh {
namespace {

// How many chunks of one peer are on the wire ahead of the one that is reduced. A single peer needs more, because no
// other peer fills the wire meanwhile.
constexpr int64_t kMostWindow = 4;
constexpr int64_t window_of(int members) { return members == 2 ? kMostWindow : 2; }
// How much a peer sends of one chunk at most, so that what one rank writes is still in the cache when the other reads
// it. A single peer may send a third packet, which takes no cache from other peers and saves a third of the chunks: 1
// to 16 MB take 3 to 10% less time (benchmarks/network.py). A fourth packet gains nothing more, and bbr's pacing delays
// it: with it 4 MB take twice the time.
constexpr int64_t most_chunk_bytes(int members) { return (members == 2 ? 3 : 2) * packets::kBytes; }
// How much all peers together send of one chunk at most, unless less than a system call's worth is left for each.
// Smaller chunks cost ranks that share processors more than the caches save: between 4 hosts without a limit on their
// network 16 MB take 14 ms with this value, and 20 ms with a quarter of it (benchmarks/network.py). Both fill 1 Gbit/s.
constexpr int64_t kStepBytes = 512 << 10;
constexpr int64_t kAlignment = 64;              // elements; scratch memory of each peer begins at a cache line
constexpr int64_t kLeastChunkBytes = 32 << 10;  // of one peer; smaller chunks cost more in system calls

class Reducer {
 public:
  Reducer(Mesh& mesh, std::span<const Slice> slices, const Reduction& reduction, Flow flow, const Hosts* hosts)
      : mesh_(mesh),
        slices_(slices),
        reduction_(reduction),
        flow_(flow),
        hosts_(hosts),
        element_bytes_(static_cast<int64_t>(size_of(reduction.dtype))),
        window_(window_of(mesh.size())) {}

  Status run();

 private:
  // Elements of chunk `index` of a slice; empty behind its end.
  Slice chunk(const Slice& slice, int64_t index) const {
    const int64_t begin = std::min(slice.begin + index * chunk_elements_, slice.end);
    const bool last = index == chunks_ - 1;
    return {slice.list, begin, last ? slice.end : std::min(begin + chunk_elements_, slice.end)};
  }
  std::byte* scratch(int64_t chunk, int rank) const {
    return scratch_.get() + ((chunk % window_) * mesh_.size() + rank) * most_elements_ * element_bytes_;
  }
  template <typename Visit>
  void each_peer(Visit&& visit) const {  // begins behind this rank, so that not all ranks send to the same one first
    for (int i = 1; i < mesh_.size(); ++i) visit((mesh_.rank() + i) % mesh_.size());
  }
  Status start_scatter(int64_t index);
  Status start_gather(int64_t index);
  void reduce(int64_t index);

  Mesh& mesh_;
  const std::span<const Slice> slices_;
  const Reduction reduction_;
  const Flow flow_;
  const Hosts* const hosts_;
  const int64_t element_bytes_;
  const int64_t window_;
  int64_t chunk_elements_ = 1;  // of all chunks but the last
  int64_t most_elements_ = 1;   // of the largest chunk, or a little more
  int64_t chunks_ = 1;
  std::unique_ptr<std::byte[]> scratch_;      // window x rank x largest chunk
  std::vector<const void*> inputs_;           // arguments of the kernel, by rank
  std::array<Flight, kMostWindow> arrivals_;  // what must be there before a chunk can be reduced
  Flight rest_;
};

Status Reducer::run() {
  const int n = mesh_.size();
  int64_t longest = 0;
  for (const Slice& slice : slices_) longest = std::max(longest, slice.size());
  if (longest == 0) return {};
  const int64_t chunk_bytes = std::clamp(kStepBytes / std::max(n - 1, 1), kLeastChunkBytes, most_chunk_bytes(n));
  const int64_t line = kAlignment * element_bytes_;
  chunk_elements_ = packets::whole(chunk_bytes) / line * kAlignment;
  chunks_ = packets::chunk_count(longest * element_bytes_, chunk_elements_ * element_bytes_);
  const int64_t last = longest - (chunks_ - 1) * chunk_elements_;
  most_elements_ = (chunks_ == 1 ? last : std::max(chunk_elements_, last)) / kAlignment * kAlignment + kAlignment;
  const int64_t window = std::min(chunks_, window_);
  scratch_.reset(new (std::nothrow) std::byte[static_cast<size_t>(window * n * most_elements_ * element_bytes_)]);
  if (!scratch_)
    return {Code::internal, error_code::out_of_memory, "There is not enough memory for a reduction's scratch space."};
  inputs_.resize(n);
  for (int64_t c = 0; c < window; ++c) HVD_TRY(start_scatter(c));
  for (int64_t c = 0; c < chunks_; ++c) {
    HVD_TRY(mesh_.finish(arrivals_[c % window_]));
    reduce(c);
    if (flow_ == Flow::scatter_gather) HVD_TRY(start_gather(c));
    if (c + window_ < chunks_) HVD_TRY(start_scatter(c + window_));
  }
  return mesh_.finish(rest_);
}

Status Reducer::start_scatter(int64_t index) {
  std::vector<Transfer> sends, receives;
  const Slice mine = chunk(slices_[mesh_.rank()], index);
  each_peer([&](int peer) {
    const Slice theirs = chunk(slices_[peer], index);
    Transfer& send = sends.emplace_back(Transfer{peer, {}});
    theirs.list->inputs(theirs.begin, theirs.end, send.pieces);
    receives.push_back({peer, {{scratch(index, peer), static_cast<size_t>(mine.size() * element_bytes_)}}});
  });
  Flight& arrival = arrivals_[index % window_];
  HVD_TRY(mesh_.start({}, receives, arrival));
  // When all members reduce the same elements, reducing in place overwrites what is being sent: wait for that as well.
  return mesh_.start(sends, {}, flow_ == Flow::replicate ? arrival : rest_);
}

// Receives the other members' results. In an in-place operation they overwrite this member's inputs of their slices,
// which those members have received by then.
Status Reducer::start_gather(int64_t index) {
  std::vector<Transfer> sends, receives;
  const Slice mine = chunk(slices_[mesh_.rank()], index);
  each_peer([&](int peer) {
    const Slice theirs = chunk(slices_[peer], index);
    mine.list->outputs(mine.begin, mine.end, sends.emplace_back(Transfer{peer, {}}).pieces);
    theirs.list->outputs(theirs.begin, theirs.end, receives.emplace_back(Transfer{peer, {}}).pieces);
  });
  return mesh_.start(sends, receives, rest_);
}

void Reducer::reduce(int64_t index) {
  const int me = mesh_.rank();
  const Slice mine = chunk(slices_[me], index);
  // Each member's input is scaled and rounded as if it had been scaled before it was sent.
  const bool scaled = reduction_.prescale != 1.0 && reduction_.dtype != DType::boolean;
  if (scaled) {
    each_peer([&](int peer) {
      kernels::scale(reduction_.dtype, scratch(index, peer), scratch(index, peer), mine.size(), reduction_.prescale);
    });
  }
  mine.list->visit(mine.begin, mine.end, [&](const std::byte* input, std::byte* output, int64_t count, int64_t offset) {
    each_peer([&](int peer) { inputs_[peer] = scratch(index, peer) + offset * element_bytes_; });
    inputs_[me] = input;
    if (scaled) {
      kernels::scale(reduction_.dtype, output, input, count, reduction_.prescale);
      inputs_[me] = output;
    }
    reduce_members(hosts_, reduction_, output, inputs_.data(), mesh_.size(), count);
  });
}

}  // namespace

Status reduce_slices(Mesh& mesh, std::span<const Slice> slices, const Reduction& reduction, Flow flow,
                     const Hosts* hosts) {
  return Reducer(mesh, slices, reduction, flow, hosts).run();
}

}  // namespace horovod::mesh
