#include "collectives/adasum_wire.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "transport/mesh.h"
#include "transport/packets.h"
#include "transport/region.h"

namespace horovod {
namespace {

class RegionWire final : public AdasumWire {
 public:
  // Half of the buffers are filled ahead, as the other half may wait to be read by a slower member; two are enough.
  explicit RegionWire(Region& region)
      : AdasumWire(region.rank(), region.size(), region.buffer_bytes(), std::min(2, region.buffer_count() / 2)),
        region_(region) {}

 private:
  void begin(int64_t pieces) override { first_ = region_.take_rounds(static_cast<uint64_t>(pieces)); }

  Status start(const Step& step, int64_t index) override {
    const uint64_t round = first_ + static_cast<uint64_t>(index);
    HVD_TRY(region_.await_buffer(round));
    const Slice sent = piece(step.sent, index);
    const size_t item = sent.list->element_bytes();
    std::byte* const buffer = region_.buffer(rank(), round);
    sent.list->visit(sent.begin, sent.end, [&](const std::byte* input, std::byte*, int64_t count, int64_t offset) {
      std::memcpy(buffer + static_cast<size_t>(offset) * item, input, static_cast<size_t>(count) * item);
    });
    region_.publish(Phase::posted, round + 1);
    return {};
  }

  Status finish(const Step& step, int64_t index) override {
    const uint64_t round = first_ + static_cast<uint64_t>(index);
    for (const Peer& peer : step.peers) {
      const Slice received = piece(peer.received, index);
      if (received.size() == 0) continue;
      HVD_TRY(region_.await(peer.member, Phase::posted, round + 1));
      const size_t item = received.list->element_bytes();
      const std::byte* const buffer = region_.buffer(peer.member, round);
      received.list->visit(
          received.begin, received.end, [&](const std::byte*, std::byte* output, int64_t count, int64_t offset) {
            std::memcpy(output, buffer + static_cast<size_t>(offset) * item, static_cast<size_t>(count) * item);
          });
    }
    region_.publish(Phase::finished, round + 1);
    return {};
  }

  Region& region_;
  uint64_t first_ = 0;  // round of the step that runs
};

class MeshWire final : public AdasumWire {
 public:
  // members: those of the mesh that take part; empty: all.
  MeshWire(Mesh& mesh, const std::vector<int>& members, int rank, int size)
      : AdasumWire(rank, size, kPieceBytes, kWindow - 1), mesh_(mesh), members_(members) {}

  bool is_sparse() const override { return !mesh_.is_full(); }

 private:
  static constexpr int64_t kWindow = 2;                       // pieces on the wire
  static constexpr size_t kPieceBytes = 2 * packets::kBytes;  // as chunks of a sum: see mesh/reduce_slices.cc

  Status start(const Step& step, int64_t index) override {
    std::vector<Transfer> sends, receives;
    const Slice sent = piece(step.sent, index);
    for (const Peer& peer : step.peers) {
      const int member = members_.empty() ? peer.member : members_[peer.member];
      const Slice received = piece(peer.received, index);
      sent.list->inputs(sent.begin, sent.end, sends.emplace_back(Transfer{member, {}}).pieces);
      received.list->outputs(received.begin, received.end, receives.emplace_back(Transfer{member, {}}).pieces);
    }
    return mesh_.start(sends, receives, flights_[index % kWindow]);
  }

  Status finish(const Step&, int64_t index) override { return mesh_.finish(flights_[index % kWindow]); }

  Mesh& mesh_;
  const std::vector<int>& members_;
  std::array<Flight, kWindow> flights_;
};

}  // namespace

std::unique_ptr<AdasumWire> AdasumWire::over(const DataPlane& plane) {
  if (plane.region) return std::make_unique<RegionWire>(*plane.region);
  Mesh& mesh = *plane.mesh;
  const std::vector<int>& members = plane.members;
  if (members.empty()) return std::make_unique<MeshWire>(mesh, members, mesh.rank(), mesh.size());
  const auto me = std::find(members.begin(), members.end(), mesh.rank());
  return std::make_unique<MeshWire>(mesh, members, static_cast<int>(me - members.begin()),
                                    static_cast<int>(members.size()));
}

Status AdasumWire::run(const Step& step) {
  const auto most = static_cast<int64_t>(piece_bytes_ / step.sent.list->element_bytes());
  const int64_t pieces = (step.longest + most - 1) / most;
  piece_elements_ = most;
  begin(pieces);
  for (int64_t index = 0; index < pieces + ahead_; ++index) {
    if (index < pieces) {
      const Slice sent = piece(step.sent, index);
      if (step.before && sent.size() > 0) step.before(sent);
      HVD_TRY(start(step, index));
    }
    if (index >= ahead_) {
      HVD_TRY(finish(step, index - ahead_));
      if (step.after) step.after((index - ahead_ + 1) * piece_elements_);
    }
  }
  return {};
}

mesh::Slice AdasumWire::piece(const Slice& slice, int64_t index) const {
  const int64_t begin = std::min(slice.begin + index * piece_elements_, slice.end);
  return {slice.list, begin, std::min(begin + piece_elements_, slice.end)};
}

}  // namespace horovod
