#include "engine/kept.h"

namespace horovod {

bool is_over(const Submission& submission) {
  if (!submission.is_done()) return false;
  if (!submission.on_device || !submission.on_device->finished) return true;
  bool passed = false;
  return !submission.on_device->finished->passed(passed).ok() || passed;
}

void Kept::add(std::shared_ptr<Submission> submission, KeepAlive alive) {
  const std::lock_guard<std::mutex> lock(mutex_);
  any_order_.emplace_back(std::move(submission), std::move(alive));
  any_.store(true, std::memory_order_relaxed);
}

void Kept::add_in_order(std::shared_ptr<Submission> submission, KeepAlive alive) {
  const std::lock_guard<std::mutex> lock(mutex_);
  in_order_.emplace_back(std::move(submission), std::move(alive));
  any_.store(true, std::memory_order_relaxed);
}

void Kept::sweep(bool stuck) {
  if (!any_.load(std::memory_order_relaxed)) return;
  std::vector<One> over;  // destroyed at the end, when the lock is released
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!stuck) {
    std::vector<One> rest;
    for (One& one : any_order_) (is_over(*one.first) ? over : rest).push_back(std::move(one));
    any_order_ = std::move(rest);
  }
  while (!in_order_.empty() && is_over(*in_order_.front().first)) {
    over.push_back(std::move(in_order_.front()));
    in_order_.pop_front();
  }
  any_.store(!any_order_.empty() || !in_order_.empty(), std::memory_order_relaxed);
}

}  // namespace horovod
