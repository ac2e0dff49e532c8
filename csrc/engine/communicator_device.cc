// Operations on a device: what runs them there, and who looks after what is queued. The background thread does, as the
// driver for a moment every few milliseconds: callers don't wait for devices, so nobody else would notice a failure
// there or the loss of a rank that the device waits for.
#include <time.h>

#include "backends/gpu/backend.h"
#include "base/clock.h"
#include "collectives/topology.h"
#include "engine/communicator.h"

namespace horovod {
namespace {

constexpr int64_t kNapNs = 200'000;
constexpr int64_t kWatchUs = 10'000;  // how often the driver looks at a device while it waits for something else

}  // namespace

Status Communicator::prepare(Submission& submission, const SharedGpu& gpu) {
  if (Status status = use(gpu); !status.ok()) {
    return {status.code(), submission.spec.name + ": " + status.message()};
  }
  return device_->mark_ready(submission);
}

Status Communicator::use(const SharedGpu& gpu) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (device_) return {};
  cuda::Peers peers;
  peers.rank = rank_;
  peers.labels = labels_;
  peers.hosts = placement_;
  peers.abort = &abort_;
  peers.timeout_us = config_.progress_timeout_ms * 1000;
  peers.gather = [this](const void* mine, size_t bytes, std::vector<std::byte>& all) {
    return gather_bytes(plane_, mine, bytes, all);
  };
  peers.look = [this] { return look_at_peers(); };
  peers.watch = [this] { return watch_device(); };
  GpuOptions options;
  options.config = config_;
  options.scope = process_set_ == 0 ? "the world" : "process set " + std::to_string(process_set_);
  options.note = [this](bool worth_saying, std::string sentence) { outbox_.note(worth_saying, std::move(sentence)); };
  options.failed = [this](const Status& status) {
    if (status.code() != Code::left) abort_.raise(status);
    if (abort_.raised()) on_abort_();
  };
  Status status;
  std::unique_ptr<DeviceBackend> made = make_gpu_backend(std::move(options), gpu, plane_, std::move(peers), status);
  if (!made) return status;
  device_ = std::move(made);
  plane_.device = device_.get();
  watched_device_.store(device_.get(), std::memory_order_release);
  return {};
}

// In a world of one.
void Communicator::run_alone(Submission& submission) {
  const std::lock_guard<std::mutex> lock(alone_mutex_);
  Operation* one[] = {&submission};
  submission.status = abort_.raised() ? abort_.cause() : device_->tend();
  if (submission.status.ok()) submission.status = run_batch(plane_, one);
  if (!submission.status.ok()) abort_.raise(submission.status);
}

Status Communicator::look_at_peers() {
  if (abort_.raised()) return abort_.cause();
  if (region_) HVD_TRY(region_->check_members());
  bool busy = false;
  return mesh_ ? mesh_->progress(busy) : Status();
}

// A batch that waits on the host keeps the driver for long, and nobody else looks whether what runs on the device
// beside it still can.
Status Communicator::watch_device() {
  DeviceBackend* const device = watched_device_.load(std::memory_order_acquire);
  if (!device || !device->busy()) return {};
  const int64_t now = now_us();
  if (now - watched_us_ < kWatchUs) return {};
  watched_us_ = now;
  return device->watch();
}

void Communicator::tend_device() {
  Status status = look_at_peers();
  if (status.ok() || status.code() == Code::left) status = device_->tend();
  if (!status.ok()) end(status);
}

void Communicator::end_device(bool orderly) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!device_) return;
  }
  if (log_) return orderly ? device_->close() : device_->abort();
  if (!orderly) return device_->abort();
  const std::lock_guard<std::mutex> lock(alone_mutex_);
  const int64_t deadline = now_us() + config_.progress_timeout_ms * 1000;
  while (device_->busy() && device_->tend().ok() && now_us() < deadline) {
    const timespec nap{0, kNapNs};
    nanosleep(&nap, nullptr);
  }
  return device_->busy() ? device_->abort() : device_->close();
}

}  // namespace horovod
