// What the engine has to say to the coordinator, and to the log of its process. The engine does not use gRPC: a session
// empties this queue and hands the answers back (Communicator::apply_*). The queue is bounded by the number of
// operations in flight, since each is announced once; beside them there are few notes, and one lost peer at most.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "collectives/op_spec.h"
#include "engine/order_log.h"

namespace horovod {

struct OutboxItem {
  enum Kind : uint8_t { announce, blocked, recalled, join, note, lost };
  Kind kind = announce;
  OpSpec spec;          // announce, blocked: the operation, under the name to announce
  uint64_t number = 0;  // announce, blocked: the number of the submission
  int process_set = 0;
  int64_t waited_us = 0;       // blocked: how long it has waited so far
  std::vector<TensorId> ids;   // recalled
  uint32_t round = 0;          // join: how many rounds of hvd.join() are over before the one that this rank is in
  bool without_zeros = false;  // join: this rank has none of its zeros under way any more
  std::string sentence;        // note: a line for the log of this rank
  bool worth_saying = false;   // note: whether everybody should see it there
  int rank = 0;                // lost: the rank of the world that is lost
  bool process_ended = false;  // lost: its process has ended; otherwise a connection to it broke
};

class Outbox {
 public:
  void push(OutboxItem item) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (closed_) return;
      items_.push_back(std::move(item));
    }
    filled_.notify_one();
  }

  void note(bool worth_saying, std::string sentence) {
    push({.kind = OutboxItem::note, .sentence = std::move(sentence), .worth_saying = worth_saying});
  }

  // Takes all items out, after waiting for the first one for up to timeout_ms. False once closed.
  bool take(int64_t timeout_ms, std::vector<OutboxItem>& items) {
    std::unique_lock<std::mutex> lock(mutex_);
    filled_.wait_for(lock, std::chrono::milliseconds(timeout_ms), [&] { return closed_ || !items_.empty(); });
    items.clear();
    items.swap(items_);
    return !closed_;
  }

  void close() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      closed_ = true;
    }
    filled_.notify_all();
  }

 private:
  std::mutex mutex_;  // guards items_ and closed_
  std::condition_variable filled_;
  std::vector<OutboxItem> items_;
  bool closed_ = false;
};

}  // namespace horovod
