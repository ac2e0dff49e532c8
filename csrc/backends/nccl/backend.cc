#include "backends/nccl/backend.h"

#include <algorithm>
#include <atomic>

#include "backends/nccl/collectives.h"
#include "backends/nccl/reduction.h"
#include "base/clock.h"

namespace horovod {
namespace {

using nccl::Comm;
using nccl::Run;

// What is queued and has not passed. Its results must not be given back meanwhile.
struct Queued {
  std::string name;
  std::shared_ptr<Moment> turn;  // its inputs are ready, and everything before it on the stream has passed
  std::shared_ptr<Moment> finished;
  std::vector<std::shared_ptr<DeviceMemory>> results;
  int64_t turn_us = 0;  // when `turn` was seen to have passed
};

class NcclBackend final : public DeviceBackend {
 public:
  NcclBackend(const nccl::Library& library, std::shared_ptr<cuda::Device> device, nccl::Peers peers,
              std::vector<std::shared_ptr<cuda::Stream>> streams)
      : library_(library), device_(std::move(device)), peers_(std::move(peers)), streams_(std::move(streams)) {
    comms_.resize(streams_.size());
    alone_.resize(streams_.size());
  }
  ~NcclBackend() override { abort(); }

  Status mark_ready(Operation& operation) override {
    const OpSpec& spec = operation.spec;
    if (spec.type == OpType::allreduce || spec.type == OpType::reducescatter) {
      nccl::ReductionPlan plan;
      for (const TensorSpec& tensor : spec.tensors) {
        HVD_TRY(nccl::plan_reduction(spec, tensor.dtype, peers_.size(), plan));
      }
    }
    OnDevice& here = *operation.on_device;
    return device_->record(reinterpret_cast<cuda::StreamHandle>(here.stream), here.ready);
  }

  Status add_zeros(Operation& operation) override {
    const std::shared_ptr<cuda::Stream>& stream = streams_[0];
    operation.on_device = std::make_unique<OnDevice>();
    operation.on_device->ordinal = device_->ordinal();
    for (const TensorSpec& tensor : operation.spec.tensors) {
      const size_t bytes = static_cast<size_t>(tensor.elements()) * size_of(tensor.dtype);
      OutputBuffer input, result;
      HVD_TRY(device_->allocate(bytes, stream, input));
      HVD_TRY(device_->allocate(bytes, stream, result));
      if (bytes > 0) {
        const cuda::Device::Current current(*device_);
        HVD_TRY(device_->driver().call(device_->driver().fill, reinterpret_cast<cuda::Address>(input.data.get()),
                                       static_cast<unsigned char>(0), bytes, stream->handle()));
      }
      operation.spans.push_back({input.data.get(), result.data.get(), tensor.elements()});
      operation.outputs.push_back(std::move(input));
      operation.outputs.push_back(std::move(result));
    }
    return device_->record(stream->handle(), operation.on_device->ready);
  }

  Status run(Batch batch) override {
    const size_t turn = batches_++ % streams_.size();
    Status status = queue(batch, turn);
    // The tensors may be let go when this returns, so nothing may go on that uses them.
    if (!status.ok()) abort();
    return status;
  }

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
      if (const std::shared_ptr<Comm> comm = made(comms_, turn)) HVD_TRY(comm->check());
    }
    return {};
  }

  void abort() override {
    ended_.store(true, std::memory_order_release);
    for (auto* comms : {&comms_, &alone_}) {
      for (size_t turn = 0; turn < comms->size(); ++turn) {
        if (const std::shared_ptr<Comm> comm = made(*comms, turn)) comm->abort();
      }
    }
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

  // Keeps a new communicator where abort() finds it, or ends it if that came first.
  Status keep(Comms& comms, size_t turn, std::shared_ptr<Comm> comm) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      comms[turn] = comm;
    }
    if (!ended_.load(std::memory_order_acquire)) return {};
    comm->abort();
    return peers_.abort->raised() ? peers_.abort->cause() : Status(Code::aborted, "Horovod has been shut down.");
  }

  Status queue(Batch batch, size_t turn) {
    Status status;
    std::shared_ptr<Comm> comm = made(comms_, turn);
    if (!comm) {
      comm = Comm::create(library_, streams_[turn], peers_, status);
      if (!comm) return status;
      HVD_TRY(keep(comms_, turn, comm));
    }
    const auto stream = streams_[turn]->handle();
    for (Operation* operation : batch) {
      HVD_TRY(operation->on_device->ready->precede(reinterpret_cast<uintptr_t>(stream)));
    }
    Queued queued;
    queued.name = batch[0]->spec.name;
    if (batch.size() > 1) queued.name += " and " + std::to_string(batch.size() - 1) + " more";
    HVD_TRY(device_->record(stream, queued.turn));
    const std::function<Status(std::shared_ptr<Comm>&)> alone = [&](std::shared_ptr<Comm>& found) -> Status {
      found = made(alone_, turn);
      if (found) return {};
      Status failed;
      found = Comm::alone(library_, streams_[turn], peers_, failed);
      return found ? keep(alone_, turn, found) : failed;
    };
    Run run{*comm, peers_, alone};
    HVD_TRY(dispatch(run, batch));
    HVD_TRY(device_->record(stream, queued.finished));
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

  static Status dispatch(Run& run, Batch batch) {
    switch (batch[0]->spec.type) {
      case OpType::allreduce:
        return nccl::allreduce(run, batch);
      case OpType::allgather:
        return nccl::allgather(run, batch);
      case OpType::broadcast:
        return nccl::broadcast(run, batch);
      case OpType::alltoall:
        return nccl::alltoall(run, batch);
      case OpType::reducescatter:
        return nccl::reducescatter(run, batch);
      case OpType::barrier:
        return {};  // that every member arrived is in the order log already
    }
    return {Code::internal, "Unknown operation type."};
  }

  Status check_time(Queued& queued) {
    const int64_t now = now_us();
    if (queued.turn_us == 0) {
      bool passed = false;
      HVD_TRY(queued.turn->passed(passed));
      if (passed) queued.turn_us = now;
    } else if (now - queued.turn_us > peers_.timeout_us) {
      return {Code::timeout, peers_.labels[peers_.rank] + " has waited " + std::to_string(peers_.timeout_us / 1000) +
                                 " ms for NCCL to finish " + queued.name +
                                 ", which every rank had started: the GPU of another rank is stopped or far behind."};
    }
    return {};
  }

  const nccl::Library& library_;
  const std::shared_ptr<cuda::Device> device_;
  const nccl::Peers peers_;
  const std::vector<std::shared_ptr<cuda::Stream>> streams_;
  uint64_t batches_ = 0;                 // driver only, and counts alike on all members
  std::vector<Queued> queued_;           // driver only
  std::atomic<size_t> queued_count_{0};  // its size, for others; orders nothing
  std::atomic<bool> ended_{false};       // set before the communicators that there are are ended
  std::mutex mutex_;                     // guards the two below
  Comms comms_, alone_;                  // by stream; null: not needed yet
};

}  // namespace

std::unique_ptr<DeviceBackend> make_nccl_backend(const std::string& nccl_file, std::shared_ptr<cuda::Device> device,
                                                 nccl::Peers peers, int streams, Status& status) {
  const nccl::Library* library = nccl::library(nccl_file, status);
  std::vector<std::shared_ptr<cuda::Stream>> made;
  while (status.ok() && static_cast<int>(made.size()) < std::max(1, streams))
    made.push_back(device->create_stream(status));
  if (!status.ok()) return nullptr;
  return std::make_unique<NcclBackend>(*library, std::move(device), std::move(peers), std::move(made));
}

}  // namespace horovod
