// What the engine has to say to the coordinator, and to the log. The engine never talks gRPC: a session drains this
// queue and feeds the answers back (Communicator::apply_*). Bounded by the number of operations in flight, since each
// is announced once, and by the few notes that there are and the one loss.
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
  OpSpec spec;          // announce, blocked; its name is the one to announce
  uint64_t number = 0;  // and the number of the submission
  int process_set = 0;
  int64_t waited_us = 0;       // blocked: how long by now
  std::vector<TensorId> ids;   // recalled
  uint32_t round = 0;          // join: this rank is in hvd.join() for the round after so many,
  bool without_zeros = false;  // and has none of its zeros under way any more
  std::string sentence;        // note: for the log of this rank,
  bool worth_saying = false;   // where everybody should see it
  int rank = 0;                // lost: this rank of the world,
  bool process_ended = false;  // whose process has ended; else a connection to it broke
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

  // All items there are, after waiting for the first one up to timeout_ms. False once closed.
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
