// Keeps the tensors of operations alive whose callers no longer wait, or on which a device still works: the engine
// reads and writes their memory until the operation is over. A tensor is opaque here, a pointer with the caller's
// deleter.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "engine/submission.h"

namespace horovod {

// Destroyed when the engine uses nothing of it any more, on whatever thread notices, with no lock of the engine's held.
using KeepAlive = std::shared_ptr<void>;

// Whether nothing uses its tensors any more: on a device that is later than when it is done.
bool is_over(const Submission& submission);

class Kept {
 public:
  void add(std::shared_ptr<Submission> submission, KeepAlive alive);
  // The operations on one device; they are over in the order in which they are added.
  void add_in_order(std::shared_ptr<Submission> submission, KeepAlive alive);
  // Releases what is over. Quick while nothing is kept. stuck: what add() has added may still be in use, and stays.
  void sweep(bool stuck);

 private:
  using One = std::pair<std::shared_ptr<Submission>, KeepAlive>;

  std::mutex mutex_;  // guards the next two; destructors of what is kept run without it, since they may add others
  std::vector<One> any_order_;
  std::deque<One> in_order_;
  // Whether there is any. Written with mutex_ held; read without (relaxed): a reader that misses the last one finds it
  // next time.
  std::atomic<bool> any_{false};
};

}  // namespace horovod
