#include "engine/device_work.h"

#include "backends/gpu/backend.h"
#include "base/clock.h"
#include "base/limits.h"
#include "collectives/topology.h"

namespace horovod {

Status DeviceWork::use(const SharedGpu& gpu) {
  const std::lock_guard<std::mutex> lock(making_);
  if (made_) return {};
  cuda::Peers peers;
  peers.rank = members_.rank;
  peers.labels = members_.labels;
  peers.hosts = members_.placement;
  peers.abort = &abort_;
  peers.timeout_us = config_.progress_timeout_ms * 1000;
  peers.gather = [this](const void* mine, size_t bytes, std::vector<std::byte>& all) {
    return gather_bytes(plane_, mine, bytes, all);
  };
  peers.look = look_at_peers_;
  peers.watch = [this] { return watch(); };
  GpuOptions options;
  options.config = config_;
  options.scope = members_.process_set == 0 ? "the world" : "process set " + std::to_string(members_.process_set);
  options.note = [this](bool worth_saying, std::string sentence) { outbox_.note(worth_saying, std::move(sentence)); };
  options.failed = [this](const Status& status) {
    if (status.code() != Code::left) abort_.raise(status);
    if (abort_.raised()) on_abort_();
  };
  Status status;
  made_ = make_gpu_backend(std::move(options), gpu, plane_, std::move(peers), status);
  if (!made_) return status;
  plane_.device = made_.get();
  used_.store(made_.get(), std::memory_order_release);
  return {};
}

Status DeviceWork::watch() {
  if (!busy()) return {};
  const int64_t now = now_us();
  if (now - watched_us_ < limits::kDeviceCheckUs) return {};
  watched_us_ = now;
  return backend()->watch();
}

Status DeviceWork::tend() {
  const Status status = look_at_peers_();
  return status.ok() || status.code() == Code::left ? backend()->tend() : status;
}

void DeviceWork::end(bool orderly) {
  if (DeviceBackend* const device = backend()) orderly ? device->close() : device->abort();
}

Status DeviceWork::run_alone(Operation& operation) {
  const std::lock_guard<std::mutex> lock(alone_);
  Operation* one[] = {&operation};
  Status status = abort_.raised() ? abort_.cause() : backend()->tend();
  if (status.ok()) status = run_batch(plane_, one);
  if (!status.ok()) abort_.raise(status);
  return status;
}

void DeviceWork::end_alone(bool orderly) {
  if (!backend() || !orderly) return end(orderly);
  const std::lock_guard<std::mutex> lock(alone_);
  const int64_t deadline = now_us() + config_.progress_timeout_ms * 1000;
  wait_until(limits::kDeviceEndWait, deadline, [this] { return !busy() || !backend()->tend().ok(); });
  end(!busy());
}

}  // namespace horovod
