// Page-locked memory of the host, which a device reads and writes by itself while the host goes on. Locking pages takes
// long, so buffers of one size are kept and used again.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "backends/cuda/device.h"

namespace horovod::cuda {

// Of one device, for all process sets together: one that stages takes what it needs and waits for nobody (two that
// waited for each other's buffers, on two ranks in two orders, would wait for ever), and gives it back when it rests.
// So no more is held than what has worked at the same time. None of it is freed before the end: the driver may wait
// then for all that runs on the device, also for what waits for another rank.
class PinnedPool {
 public:
  PinnedPool(std::shared_ptr<Device> device, size_t buffer_bytes)
      : device_(std::move(device)), buffer_bytes_(buffer_bytes) {}
  ~PinnedPool();
  PinnedPool(const PinnedPool&) = delete;
  PinnedPool& operator=(const PinnedPool&) = delete;

  size_t buffer_bytes() const { return buffer_bytes_; }

  // A buffer for the caller alone. Any thread, as give_back().
  Status take(std::byte*& buffer);
  // No copy from or to it is under way any more.
  void give_back(std::byte* buffer);

 private:
  const std::shared_ptr<Device> device_;
  const size_t buffer_bytes_;
  std::mutex mutex_;  // guards idle_
  std::vector<std::byte*> idle_;
};

}  // namespace horovod::cuda
