// Page-locked memory of the host, which a device reads and writes by itself while the host goes on. Locking pages takes
// long, so buffers of one size are kept and used again.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "backends/cuda/device.h"

namespace horovod::cuda {

// The page-locked buffers of one device, for all process sets together. A backend takes as many as it needs without
// waiting for others to give theirs back (two that waited for each other, on two ranks in two orders, would deadlock),
// and gives them back when it rests. So there are as many as were ever in use at once. None is freed before the end: to
// free one, CUDA's driver may wait for all work on the device, also for work that waits for another rank.
class PinnedPool {
 public:
  PinnedPool(std::shared_ptr<Device> device, size_t buffer_bytes)
      : device_(std::move(device)), buffer_bytes_(buffer_bytes) {}
  ~PinnedPool();
  PinnedPool(const PinnedPool&) = delete;
  PinnedPool& operator=(const PinnedPool&) = delete;

  size_t buffer_bytes() const { return buffer_bytes_; }

  // Takes a buffer for the caller alone. Any thread may call it, and give_back().
  Status take(std::byte*& buffer);
  // To be called when no copy from or to the buffer is under way any more.
  void give_back(std::byte* buffer);

 private:
  const std::shared_ptr<Device> device_;
  const size_t buffer_bytes_;
  std::mutex mutex_;  // guards idle_
  std::vector<std::byte*> idle_;
};

}  // namespace horovod::cuda
