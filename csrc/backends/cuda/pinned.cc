#include "backends/cuda/pinned.h"

#include <string>

namespace horovod::cuda {

PinnedPool::~PinnedPool() {
  const Device::Current current(*device_);
  for (std::byte* buffer : idle_) (void)device_->driver().free_pinned(buffer);
}

Status PinnedPool::take(std::byte*& buffer) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!idle_.empty()) {
      buffer = idle_.back();
      idle_.pop_back();
      return {};
    }
  }
  const Device::Current current(*device_);
  HVD_TRY(current.status());
  const Driver& driver = device_->driver();
  void* memory = nullptr;
  const int result = driver.allocate_pinned(&memory, buffer_bytes_, kPortable);
  if (result == kOutOfMemory) {
    return {Code::internal, error_code::out_of_memory,
            "This host has no memory left that can be page-locked: " + std::to_string(buffer_bytes_) +
                " bytes were asked for, through which GPU tensors go. Free some, or raise what limits "
                "this process (ulimit -l, or its container)."};
  }
  if (result != 0) return driver.failure(driver.allocate_pinned.name, result);
  buffer = static_cast<std::byte*>(memory);
  return {};
}

void PinnedPool::give_back(std::byte* buffer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  idle_.push_back(buffer);
}

}  // namespace horovod::cuda
