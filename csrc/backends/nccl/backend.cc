#include "backends/nccl/backend.h"

#include <algorithm>
#include <atomic>
#include <thread>

#include "backends/nccl/collectives.h"
#include "base/clock.h"
#include "base/limits.h"
#include "collectives/dispatch.h"

namespace horovod {
namespace {

using nccl::Comm;
using nccl::Run;

// A batch that is queued and has not passed. Its results must not be given back meanwhile.
struct Queued {
  std::string name;
  std::shared_ptr<DeviceEvent> turn;  // its inputs are ready, and everything before it on the stream has passed
  std::shared_ptr<DeviceEvent> finished;
  std::vector<std::shared_ptr<DeviceMemory>> results;
  int64_t turn_us = 0;  // when `turn` was seen to have passed
};

constexpr Functions<Run&> kFunctions = functions<Run&>({{OpType::allreduce, nccl::allreduce},
                                                        {OpType::allgather, nccl::allgather},
                                                        {OpType::broadcast, nccl::broadcast},
                                                        {OpType::alltoall, nccl::alltoall},
                                                        {OpType::reducescatter, nccl::reducescatter}});

class NcclBackend final : public DevicePath {
 public:
  NcclBackend(const nccl::Library& library, std::shared_ptr<cuda::Device> device, nccl::Peers peers,
              std::vector<std::shared_ptr<cuda::Stream>> streams, const nccl::PackRule& pack_rule,
              std::shared_ptr<cuda::Copier> copier)
      : library_(library),
        device_(std::move(device)),
        peers_(std::move(peers)),
        streams_(std::move(streams)),
        pack_rule_(pack_rule),
        copier_(std::move(copier)),
        buffers_(streams_.size()) {
    comms_.resize(streams_.size());
    alone_.resize(streams_.size());
    unpacked_.resize(streams_.size());
  }
  ~NcclBackend() override {
    abort();
    if (!packs_have_passed()) copier_->leave_loaded();
  }

  Status run(Batch batch) override { return queue(batch, batches_++ % streams_.size()); }

  bool has(OpType type) const override { return horovod::has(kFunctions, type); }
  bool busy() const override { return queued_count_.load(std::memory_order_relaxed) > 0; }

  Status tend() override {
    for (auto one = queued_.begin(); one != queued_.end();) {
      bool passed = false;
      HVD_TRY(one->finished->passed(passed));
      if (passed) {
        one = queued_.erase(one);
        continue;
      }
      HVD_TRY(check_time(*one++));
    }
    queued_count_.store(queued_.size(), std::memory_order_relaxed);
    if (queued_.empty()) return {};
    for (size_t turn = 0; turn < comms_.size(); ++turn) {
      if (const std::shared_ptr<Comm> comm = made(comms_, turn)) HVD_TRY(comm->check(peers_));
    }
    return {};
  }
  Status watch() override { return tend(); }  // safe inside run(), which holds on to nothing that tend() changes

  void abort() override {
    ended_.store(true, std::memory_order_release);
    // All at once: NCCL may wait for what is queued, and that may wait, by way of the framework's stream, for an
    // operation of another communicator, which only the abort of that one ends.
    std::vector<std::thread> aborting;
    for (auto* comms : {&comms_, &alone_}) {
      for (size_t turn = 0; turn < comms->size(); ++turn) {
        if (std::shared_ptr<Comm> comm = made(*comms, turn)) {
          aborting.emplace_back([comm = std::move(comm)] { comm->abort(); });
        }
      }
    }
    for (std::thread& thread : aborting) thread.join();
    // What follows an operation of NCCL on the stream still runs, and writes to tensors. It has not far to go, but for
    // what the framework still computes before it.
    wait_until(limits::kDeviceEndWait, now_us() + limits::kDeviceEndUs, [this] { return packs_have_passed(); });
  }

  void close() override {
    if (ended_.exchange(true)) return;
    for (auto* comms : {&comms_, &alone_}) {
      for (size_t turn = 0; turn < comms->size(); ++turn) {
        if (const std::shared_ptr<Comm> comm = made(*comms, turn)) comm->close(peers_);
      }
    }
  }

 private:
  using Comms = std::vector<std::shared_ptr<Comm>>;

  std::shared_ptr<Comm> made(const Comms& comms, size_t turn) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return comms[turn];
  }

  // Whether the device is done with all buffers, or of no use any more.
  bool packs_have_passed() {
    std::vector<std::shared_ptr<DeviceEvent>> events;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      events = unpacked_;
    }
    return std::all_of(events.begin(), events.end(), [](const std::shared_ptr<DeviceEvent>& event) {
      bool passed = false;
      return !event || !event->passed(passed).ok() || passed;
    });
  }

  // Keeps a new communicator where abort() finds it, or ends it if that came first.
  Status keep(Comms& comms, size_t turn, std::shared_ptr<Comm> comm) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      comms[turn] = comm;
    }
    const Status status = ended();
    if (!status.ok()) comm->abort();
    return status;
  }

  Status ended() const {
    if (!ended_.load(std::memory_order_acquire)) return {};
    return peers_.abort->raised() ? peers_.abort->cause()
                                  : Status(Code::aborted, error_code::shut_down, "Horovod has been shut down.");
  }

  // `stream` goes on when all inputs are there: after the last event of each of the framework's streams, which has
  // all earlier ones before it.
  Status await_inputs(Batch batch, cuda::StreamHandle stream) const {
    const cuda::Device::Current current(*device_);  // the device is current for all calls below
    HVD_TRY(current.status());
    std::vector<const OnDevice*> last;
    for (const Operation* operation : batch) {
      const OnDevice& here = *operation->on_device;
      const auto same = std::find_if(last.begin(), last.end(), [&](const OnDevice* other) {
        return other->stream == here.stream && other->ready_number > 0 && here.ready_number > 0;
      });
      if (same == last.end()) {
        last.push_back(&here);
      } else if ((*same)->ready_number < here.ready_number) {
        *same = &here;
      }
    }
    for (const OnDevice* one : last) HVD_TRY(one->ready->precede(reinterpret_cast<uintptr_t>(stream)));
    return {};
  }

  Status queue(Batch batch, size_t turn) {
    Status status;
    std::shared_ptr<Comm> comm = made(comms_, turn);
    if (!comm) {
      comm = Comm::create(library_, streams_[turn], peers_, status);
      const Status kept = keep(comms_, turn, comm);
      HVD_TRY(status);
      HVD_TRY(kept);
    }
    const auto stream = streams_[turn]->handle();
    HVD_TRY(await_inputs(batch, stream));
    Queued queued;
    queued.name = batch[0]->spec.name;
    if (batch.size() > 1) queued.name += " and " + std::to_string(batch.size() - 1) + " more";
    HVD_TRY(device_->record(stream, queued.turn));
    const std::function<Status(std::shared_ptr<Comm>&)> alone = [&](std::shared_ptr<Comm>& found) -> Status {
      found = made(alone_, turn);
      if (found) return {};
      Status failed;
      found = Comm::alone(library_, streams_[turn], peers_, failed);
      const Status kept = keep(alone_, turn, found);
      return failed.ok() ? kept : failed;
    };
    Run run{*comm, peers_, alone, {pack_rule_, *copier_, buffers_[turn]}};
    const Status dispatched = dispatch<Run&>(kFunctions, run, batch);
    const Status recorded = device_->record(stream, queued.finished);
    if (run.packing.used) {  // a batch that failed half-way may have used the buffer, too
      const std::lock_guard<std::mutex> lock(mutex_);
      unpacked_[turn] = queued.finished;
    }
    HVD_TRY(dispatched);
    HVD_TRY(recorded);
    if (run.packing.used) HVD_TRY(ended());  // abort() may have run before this event was in `unpacked_`
    for (Operation* operation : batch) {
      operation->on_device->finished = queued.finished;
      for (const OutputBuffer& output : operation->outputs) {
        if (output.on_device) queued.results.push_back(output.on_device);
      }
    }
    queued_.push_back(std::move(queued));
    queued_count_.store(queued_.size(), std::memory_order_relaxed);
    return {};
  }

  Status check_time(Queued& queued) {
    const int64_t now = now_us();
    if (queued.turn_us == 0) {
      bool passed = false;
      HVD_TRY(queued.turn->passed(passed));
      if (passed) queued.turn_us = now;
    } else if (now - queued.turn_us > peers_.timeout_us) {
      return {Code::timeout, error_code::no_progress,
              capitalized(peers_.labels[peers_.rank]) + " has waited " + std::to_string(peers_.timeout_us / 1000) +
                  " ms for NCCL to finish " + queued.name +
                  ", which every rank had started: the GPU of another rank is stopped or far behind."};
    }
    return {};
  }

  const nccl::Library& library_;
  const std::shared_ptr<cuda::Device> device_;
  const nccl::Peers peers_;
  const std::vector<std::shared_ptr<cuda::Stream>> streams_;
  // Only the driver uses `batches_`, `queued_` and `buffers_`. `mutex_` guards what stands below it.
  uint64_t batches_ = 0;                 // batches run so far, the same number on all members
  std::vector<Queued> queued_;           // batches that the device has not finished
  std::atomic<size_t> queued_count_{0};  // the size of `queued_`, for other threads; relaxed
  std::atomic<bool> ended_{false};       // set before abort() or shutdown ends the communicators
  const nccl::PackRule pack_rule_;
  const std::shared_ptr<cuda::Copier> copier_;
  std::vector<nccl::PackBuffer> buffers_;  // one for each stream
  std::mutex mutex_;
  Comms comms_;  // communicators of all members, one for each stream; null until the stream's first batch needs it
  Comms alone_;  // communicators of this rank alone, one for each stream
  // For each stream, the event behind the last batch that went through its pack buffer: once that has passed, nothing
  // uses the buffer. Null: no batch of the stream was packed.
  std::vector<std::shared_ptr<DeviceEvent>> unpacked_;
};

}  // namespace

std::unique_ptr<DevicePath> make_nccl_backend(const nccl::Library& library, const Config& config,
                                              std::shared_ptr<cuda::Device> device, nccl::Peers peers,
                                              std::shared_ptr<cuda::Copier> copier, Status& status) {
  std::vector<std::shared_ptr<cuda::Stream>> made;
  status = {};
  while (status.ok() && static_cast<int>(made.size()) < std::max(1, config.nccl_streams))
    made.push_back(device->create_stream(status));
  if (!status.ok()) return nullptr;
  const nccl::PackRule rule{config.gpu_pack_threshold_bytes, config.gpu_pack_count, config.fusion_threshold_bytes};
  return std::make_unique<NcclBackend>(library, std::move(device), std::move(peers), std::move(made), rule,
                                       std::move(copier));
}

}  // namespace horovod
