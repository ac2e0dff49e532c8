#include "backends/nccl/comm.h"

#include <algorithm>
#include <cstring>

#include "base/clock.h"
#include "base/limits.h"

namespace horovod::nccl {
namespace {

// What a member tells the others about a step that all of them must have taken.
struct Outcome {
  UniqueId id{};        // the first member's id for the new communicator
  char failure[384]{};  // why the step failed; empty: it succeeded

  void fail(const Status& status) {
    const std::string message = shortened(status.message(), sizeof failure - 1);
    std::memcpy(failure, message.data(), message.size());
  }
};

Status could_not_start(const Peers& peers, int rank, const std::string& why) {
  return {Code::internal, "NCCL could not be started on " + peers.labels[rank] + ": " + why};
}

// Exchanges outcomes; fails alike on all members when the step has failed on one.
Status agree(const Peers& peers, const Outcome& mine, UniqueId& id) {
  std::vector<std::byte> all;
  HVD_TRY(peers.gather(&mine, sizeof mine, all));
  for (int rank = 0; rank < peers.size(); ++rank) {
    Outcome theirs;
    std::memcpy(&theirs, all.data() + static_cast<size_t>(rank) * sizeof theirs, sizeof theirs);
    theirs.failure[sizeof theirs.failure - 1] = '\0';
    if (rank == 0) id = theirs.id;
    if (theirs.failure[0] != '\0') {
      return could_not_start(peers, rank, theirs.failure);
    }
  }
  return {};
}

}  // namespace

Status Comm::ended() { return {Code::aborted, error_code::shut_down, "The communicator of NCCL has ended."}; }

std::shared_ptr<Comm> Comm::create(const Library& library, std::shared_ptr<cuda::Stream> stream, const Peers& peers,
                                   Status& status) {
  std::shared_ptr<Comm> comm(new Comm(library, std::move(stream)));
  Outcome mine;
  if (peers.rank == 0) {
    if (Status failed = comm->make_id(mine.id); !failed.ok()) mine.fail(failed);
  }
  UniqueId id;
  status = agree(peers, mine, id);
  if (!status.ok()) return comm;
  const Status started = comm->init(id, peers.rank, peers.size(), peers);
  if (started.code() == Code::internal) {  // ends the epoch, which the others notice while they wait in NCCL
    status = could_not_start(peers, peers.rank, started.message());
    return comm;
  }
  if (!started.ok() && started.code() != Code::timeout) {
    status = started;
    return comm;
  }
  // NCCL does not say for whom it waits in vain; the data plane does, when that member's outcome does not come.
  mine = {};
  if (!started.ok()) mine.fail(started);
  status = agree(peers, mine, id);
  return comm;
}

std::shared_ptr<Comm> Comm::alone(const Library& library, std::shared_ptr<cuda::Stream> stream, const Peers& peers,
                                  Status& status) {
  std::shared_ptr<Comm> comm(new Comm(library, std::move(stream)));
  UniqueId id;
  status = comm->make_id(id);
  if (status.ok()) status = comm->init(id, 0, 1, peers);
  return comm;
}

// With the device current, as for all that may initialize CUDA: where none is, its runtime would take GPU 0.
Status Comm::make_id(UniqueId& id) const {
  const cuda::Device::Current current(stream_->device());
  HVD_TRY(current.status());
  return call(library_.unique_id, &id);
}

Status Comm::init(const UniqueId& id, int rank, int size, const Peers& peers) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const cuda::Device::Current current(stream_->device());
    HVD_TRY(current.status());
    Config config;
    HVD_TRY(call(library_.init_rank, &handle_, size, id, rank, &config));
  }
  return settle(peers);
}

Status Comm::state_locked(int& state) const {
  if (!handle_) return ended();
  HVD_TRY(call(library_.async_error, handle_, &state));
  if (state == kSuccess || state == kInProgress) return {};
  return library_.failure("communicator", state, handle_);
}

Status Comm::settle(const Peers& peers) {
  const int64_t end_us = now_us() + peers.timeout_us;
  Wait wait(limits::kNcclWait);
  for (;;) {
    int state = kInProgress;
    Status status;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      status = state_locked(state);
    }
    if (peers.abort->raised()) return peers.abort->cause();  // the abort's cause explains more
    if (!status.ok()) return explain(std::move(status), state, peers);
    if (state == kSuccess) return {};
    const int64_t now = now_us();
    if (wait.phase(now) == Wait::sleeps) {
      if (Status lost = peers.look(); !lost.ok() && lost.code() != Code::left) return lost;
      HVD_TRY(peers.watch());
      if (now > end_us) {
        return {Code::timeout, error_code::no_progress,
                "NCCL made no progress for " + std::to_string(peers.timeout_us / 1000) + " ms on " +
                    peers.labels[peers.rank] + "."};
      }
    }
    wait.turn(now);
  }
}

Status Comm::create_premul_sum(int& op, const void* scalar, DataType type) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!handle_) return ended();
  return call(library_.create_premul_sum, &op, const_cast<void*>(scalar), type, kHostScalar, handle_);
}

void Comm::destroy_op(int op) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (handle_) (void)library_.destroy_op(op, handle_);
}

Status Comm::check(const Peers& peers) {
  int state = kSuccess;
  Status status;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    status = state_locked(state);
  }
  return status.ok() ? status : explain(std::move(status), state, peers);
}

// The connections of a process that is killed end before the process does, and NCCL's may be the first.
Status Comm::explain(Status status, int state, const Peers& peers) {
  if (state != kRemoteError && state != kSystemError) return status;
  wait_until(limits::kDeviceEndWait, now_us() + limits::kNcclGraceUs, [&] {
    Status lost = peers.abort->raised() ? peers.abort->cause() : peers.look();
    if (lost.ok()) return false;
    status = std::move(lost);
    return true;
  });
  return status;
}

void Comm::abort() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!handle_) return;
  const cuda::Device::Current current(stream_->device());
  (void)library_.abort(handle_);
  handle_ = nullptr;
}

void Comm::close(const Peers& peers) {
  Peers patient = peers;
  patient.timeout_us = std::min(peers.timeout_us, limits::kCloseUs);
  Status status;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!handle_) return;
    const cuda::Device::Current current(stream_->device());
    status = call(library_.finalize, handle_);
  }
  if (status.ok()) status = settle(patient);
  if (!status.ok()) return abort();
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!handle_) return;
  const cuda::Device::Current current(stream_->device());
  (void)library_.destroy(handle_);
  handle_ = nullptr;
}

}  // namespace horovod::nccl
