// The end of an epoch, seen by every wait of an engine. The first cause wins: later ones are consequences of it.
#pragma once

#include <atomic>
#include <mutex>

#include "base/status.h"

namespace horovod {

class AbortSignal {
 public:
  // True for the first caller only.
  bool raise(Status cause) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (raised_.load(std::memory_order_relaxed)) return false;
    cause_ = std::move(cause);
    raised_.store(true, std::memory_order_release);
    return true;
  }

  bool raised() const { return raised_.load(std::memory_order_acquire); }

  // Valid once raised() was seen true; never changes after that.
  Status cause() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return cause_;
  }

 private:
  mutable std::mutex mutex_;         // guards cause_ and the single transition of raised_
  std::atomic<bool> raised_{false};  // released after cause_ is written, so an acquiring reader may read cause_
  Status cause_;
};

}  // namespace horovod
