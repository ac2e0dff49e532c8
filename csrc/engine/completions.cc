#include "engine/completions.h"

#include <condition_variable>
#include <deque>
#include <utility>

#include "engine/submission.h"

namespace horovod {

struct Completions::Queue {
  std::mutex mutex;  // guards the next two; the innermost lock: it is taken with a communicator's lock held
  std::deque<std::shared_ptr<Submission>> done;
  bool closed = false;
  std::condition_variable filled;
};

Completions::Completions() : queue_(std::make_shared<Queue>()) {}

Completions::~Completions() {
  {
    const std::lock_guard<std::mutex> lock(queue_->mutex);
    queue_->closed = true;
  }
  queue_->filled.notify_one();
  if (thread_.get_id() == std::this_thread::get_id()) {
    thread_.detach();
  } else if (thread_.joinable()) {
    thread_.join();
  }
}

void Completions::start() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!thread_.joinable()) thread_ = std::thread([queue = queue_] { serve(queue); });
}

void Completions::add(std::shared_ptr<Submission> submission) {
  {
    const std::lock_guard<std::mutex> lock(queue_->mutex);
    queue_->done.push_back(std::move(submission));
  }
  queue_->filled.notify_one();
}

void Completions::serve(const std::shared_ptr<Queue>& queue) {
  for (;;) {
    std::shared_ptr<Submission> next;
    {
      std::unique_lock<std::mutex> lock(queue->mutex);
      queue->filled.wait(lock, [&] { return queue->closed || !queue->done.empty(); });
      if (queue->done.empty()) return;
      next = std::move(queue->done.front());
      queue->done.pop_front();
    }
    // Moved out of the queue, so that what it refers to (perhaps the engine, for the last time) is released with this
    // call.
    const auto on_done = std::exchange(next->on_done, nullptr);
    on_done(next);
  }
}

}  // namespace horovod
