#include "backends/staging/backend.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <numeric>
#include <utility>
#include <vector>

#include "backends/staging/collectives.h"
#include "base/clock.h"
#include "collectives/dispatch.h"
#include "transport/mesh.h"

namespace horovod {
namespace {

// A batch whose last copies are on their way back. Its results must not be given back meanwhile.
struct Queued {
  std::string name;
  std::shared_ptr<DeviceEvent> finished;
  std::vector<std::shared_ptr<DeviceMemory>> results;
  int64_t since_us = 0;
};

constexpr Functions<staging::Run&> kFunctions =
    functions<staging::Run&>({{OpType::allreduce, staging::allreduce},
                              {OpType::allgather, staging::allgather},
                              {OpType::broadcast, staging::broadcast},
                              {OpType::alltoall, staging::alltoall},
                              {OpType::reducescatter, staging::reducescatter}});

class StagingBackend final : public DevicePath {
 public:
  StagingBackend(std::shared_ptr<cuda::PinnedPool> pool, DataPlane plane, cuda::Peers peers,
                 std::shared_ptr<cuda::Stream> down, std::shared_ptr<cuda::Stream> up)
      : plane_(std::move(plane)),
        peers_(std::move(peers)),
        pipeline_(std::move(pool), peers_, std::move(down), std::move(up)) {}

  Status run(Batch batch) override {
    Status status = stage(batch);
    // The caller may free the tensors when this returns, so no copy may go on that uses them.
    if (!status.ok()) pipeline_.drain();
    return status;
  }

  bool has(OpType type) const override { return horovod::has(kFunctions, type); }
  bool busy() const override { return queued_count_.load(std::memory_order_relaxed) > 0; }

  Status tend() override {
    for (auto one = queued_.begin(); one != queued_.end();) {
      bool passed = false;
      HVD_TRY(one->finished->passed(passed));
      if (!passed && now_us() - one->since_us > peers_.timeout_us) {
        return {Code::timeout, error_code::gpu_stalled,
                capitalized(peers_.labels[peers_.rank]) + " has waited " + std::to_string(peers_.timeout_us / 1000) +
                    " ms for its own GPU to take the result of " + one->name +
                    ": it stands still. See the kernel's log and nvidia-smi."};
      }
      one = passed ? queued_.erase(one) : one + 1;
    }
    if (queued_.empty() && busy()) pipeline_.rest();
    queued_count_.store(queued_.size(), std::memory_order_relaxed);
    return {};
  }

  // run() itself waits for all of its work but the last copies, which depend on no peer. And tend() must not be called
  // here: it would give the buffers back that run() is using.
  Status watch() override { return {}; }

  // Nothing on the device waits for a peer: copies that are queued come to their end.
  void abort() override {}
  void close() override {}

 private:
  Status stage(Batch batch) {
    Queued queued;
    queued.name = batch[0]->spec.name;
    if (batch.size() > 1) queued.name += " and " + std::to_string(batch.size() - 1) + " more";
    HVD_TRY(meet(batch, queued.name));
    staging::Run run{pipeline_, plane_, peers_, queued.name};
    const OpSpec& spec = batch[0]->spec;
    const bool adasum = spec.type == OpType::allreduce && spec.reduce_op == ReduceOp::adasum;
    HVD_TRY(adasum ? staging::adasum(run, batch) : dispatch<staging::Run&>(kFunctions, run, batch));
    const cuda::Stream& up = *pipeline_.up();
    HVD_TRY(up.device().record(up.handle(), queued.finished));
    for (Operation* operation : batch) {
      operation->on_device->finished = queued.finished;
      for (const OutputBuffer& output : operation->outputs) {
        if (output.on_device) queued.results.push_back(output.on_device);
      }
    }
    queued.since_us = now_us();
    queued_.push_back(std::move(queued));
    queued_count_.store(queued_.size(), std::memory_order_relaxed);
    return {};
  }

  // Returns when everybody's tensors are ready. Between hosts nobody may send data before that: a connection with data
  // for a transfer that this member has not begun shows nothing behind it, neither an abort nor the peer's end, and how
  // long the framework's work takes is not ours to say. So each sends a byte when it is ready, and what it expects from
  // the others was begun before.
  Status meet(Batch batch, const std::string& what) {
    Mesh* const mesh = plane_.mesh;
    if (mesh && rounds_.empty()) plan_rounds(*mesh);
    for (Round& round : rounds_) HVD_TRY(mesh->start({}, round.receives, round.coming));
    for (Operation* operation : batch) HVD_TRY(pipeline_.await(*operation->on_device->ready, what));
    for (Round& round : rounds_) {
      HVD_TRY(mesh->start(round.sends, {}, round.going));
      HVD_TRY(mesh->finish(round.coming));
      HVD_TRY(mesh->finish(round.going));
    }
    return {};
  }

  // In a full mesh everybody tells everybody, in one round. In a sparse one a member tells the partner at distance 1,
  // 2, 4, ... in a circle that it is ready, and so are those of whom it has heard by then.
  void plan_rounds(const Mesh& mesh) {
    const auto size = static_cast<size_t>(mesh.size());
    signs_.resize(2 * size);
    std::vector<int> members = plane_.members;
    if (members.empty()) {
      members.resize(size);
      std::iota(members.begin(), members.end(), 0);
    }
    const size_t count = members.size();
    const auto me = static_cast<size_t>(std::find(members.begin(), members.end(), mesh.rank()) - members.begin());
    const auto add = [&](Round& round, size_t to, size_t from) {
      const int receiver = members[to % count], sender = members[from % count];
      round.receives.push_back({sender, {{&signs_[static_cast<size_t>(sender)], 1}}});
      round.sends.push_back({receiver, {{&signs_[size + static_cast<size_t>(receiver)], 1}}});
    };
    if (mesh.is_full()) {
      Round& all = rounds_.emplace_back();
      for (size_t other = 0; other < count; ++other) {
        if (other != me) add(all, other, other);
      }
      return;
    }
    for (size_t distance = 1; distance < count; distance *= 2) {
      add(rounds_.emplace_back(), me + distance, me + count - distance);
    }
  }

  struct Round {  // of meet()
    std::vector<Transfer> receives, sends;
    Flight coming, going;
  };

  const DataPlane plane_;
  const cuda::Peers peers_;
  staging::Pipeline pipeline_;  // uses peers_
  // Buffers of meet(), as the next member is: the mesh may use them when meet() has failed.
  std::vector<std::byte> signs_;
  std::deque<Round> rounds_;
  std::vector<Queued> queued_;           // driver only
  std::atomic<size_t> queued_count_{0};  // the size of `queued_` for other threads; relaxed
};

}  // namespace

std::unique_ptr<DevicePath> make_staging_backend(std::shared_ptr<cuda::Device> device,
                                                 std::shared_ptr<cuda::PinnedPool> pool, DataPlane plane,
                                                 cuda::Peers peers, Status& status) {
  std::shared_ptr<cuda::Stream> down = device->create_stream(status);
  std::shared_ptr<cuda::Stream> up = status.ok() ? device->create_stream(status) : nullptr;
  if (!status.ok()) return nullptr;
  return std::make_unique<StagingBackend>(std::move(pool), std::move(plane), std::move(peers), std::move(down),
                                          std::move(up));
}

}  // namespace horovod
