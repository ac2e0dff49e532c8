// Keeps tensors alive that the engine still reads or writes though their caller no longer waits, or though the
// operation is done and a device still works on it. A tensor is a pointer with the caller's deleter here.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "engine/submission.h"

namespace horovod {

// Destroyed when the engine does not use it any more, on the thread that notices this, which holds no lock of the
// engine.
using KeepAlive = std::shared_ptr<void>;

// Whether nothing uses its tensors any more: on a device that is later than when it is done.
bool is_over(const Submission& submission);

class Kept {
 public:
  void add(std::shared_ptr<Submission> submission, KeepAlive alive);
  // The operations on one device; they are over in the order in which they are added.
  void add_in_order(std::shared_ptr<Submission> submission, KeepAlive alive);
  // Releases the tensors of operations that are over. Fast while nothing is kept. stuck: tensors of add() may still be
  // in use, and are kept.
  void sweep(bool stuck);

 private:
  using One = std::pair<std::shared_ptr<Submission>, KeepAlive>;

  std::mutex mutex_;  // guards the next two; destructors of what is kept run without it, since they may add others
  std::vector<One> any_order_;
  std::deque<One> in_order_;
  // Whether anything is kept. Written with mutex_ held, read without it (relaxed): a reader that misses the last one
  // finds it in its next call.
  std::atomic<bool> any_{false};
};

}  // namespace horovod
