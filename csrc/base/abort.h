// The end of an epoch, seen by every wait of an engine. The first cause wins: later ones are consequences of it.
#pragma once

#include <atomic>
#include <mutex>
#include <optional>
#include <string>

#include "base/status.h"

namespace horovod {

// A peer that this member found to be lost, for the coordinator to hear.
struct LostPeer {
  std::string label;           // the rank's name in messages
  bool process_ended = false;  // the pidfd of its process says so; else a connection to it broke
};

class AbortSignal {
 public:
  // Called before raise() by the thread that finds a lost rank. The first one counts: others may follow from it.
  void note_lost(std::string label, bool process_ended) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!lost_) lost_ = LostPeer{std::move(label), process_ended};
  }

  std::optional<LostPeer> lost() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return lost_;
  }

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
  mutable std::mutex mutex_;         // guards cause_, lost_ and the single transition of raised_
  std::atomic<bool> raised_{false};  // released after cause_ is written, so an acquiring reader may read cause_
  Status cause_;
  std::optional<LostPeer> lost_;
};

}  // namespace horovod
