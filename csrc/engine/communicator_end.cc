// How a communicator ends: with the epoch, because of a peer or the abort signal, or in order.
#include <algorithm>
#include <chrono>
#include <utility>

#include "engine/communicator.h"

namespace horovod {
namespace {

constexpr int64_t kCloseUs = 1'000'000;  // how long close() waits for what is agreed

}  // namespace

Status Communicator::with_context(const Status& status, const Submission& submission) const {
  return {status.code(),
          status.message() + " (Rank " + std::to_string(ranks_[rank_]) + " was running " + submission.spec.name + ".)"};
}

void Communicator::end(const Status& status) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    fail_locked(status);
    driver_changed_.notify_all();
  }
  if (status.code() != Code::left) abort_.raise(status);  // ends the epoch for all communicators, here and on all ranks
  if (!abort_.raised()) return;
  on_abort_();
  if (!mesh_) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  farewell_due_ = true;
  background_wanted_.notify_one();
}

void Communicator::fail_locked(const Status& status) {
  if (ended_.ok()) ended_ = status;
  join_.close();
  table_.end(effects_);
  for (const Effect& effect : effects_) effect.done->status = with_context(ended_, *effect.done);
  apply_effects();
}

void Communicator::abort_raised() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    device_end_due_ = device_ && log_;
    // The end of what is on the device may wait for other communicators, and whoever calls this has still to tell them.
    if (!log_ && device_ && !closed_ && !device_ending_.joinable())
      device_ending_ = std::thread([this] { end_device(false); });
  }
  if (!log_) return;
  background_wanted_.notify_one();
  const std::string cause = abort_.cause().message();
  if (region_) region_->announce_end(MemberState::aborted, cause);
  if (mesh_) mesh_->announce_end(ControlKind::abort, cause);
  log_->wake();
}

// A thread is somewhere in an operation, and does not look whether the epoch is over.
Status Communicator::give_up_locked() {
  std::string what;
  for (const auto& [submission, owner] : table_.in_flight()) {
    stuck_operations_.push_back(owner);
    if (what.empty() && submission->running.load(std::memory_order_relaxed)) what = submission->spec.name;
  }
  if (what.empty()) what = "an operation";
  stuck_ = {Code::timeout,
            labels_[rank_] + " has ended its part of the world, but a thread of it is still in the middle of " + what +
                " after " + std::to_string(config_.close_timeout_ms) +
                " ms and does not look up: the memory of a tensor may be a file on a file system that does not answer, "
                "or a debugger holds the thread. What it may use is kept until the process ends."};
  return stuck_;
}

Status Communicator::close(const std::string& farewell, const std::string& why) {
  if (!log_) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (std::exchange(closed_, true)) return {};
      closed_why_ = why;
    }
    end_device(!abort_.raised());
    if (device_ending_.joinable()) device_ending_.join();
    return {};
  }
  bool orderly = false;
  const Status status(Code::aborted, why + " The operation was not finished by all ranks before.");
  {
    std::unique_lock<std::mutex> lock(mutex_);
    if (closed_) return stuck_;
    closed_ = true;
    closed_why_ = why;
    join_.close();
    table_.close(status, effects_);
    apply_effects();
    const int64_t deadline = now_us() + kCloseUs;
    ++helpers_;
    while (is_pending() && ended_.ok() && now_us() < deadline) {
      if (driving_) {
        if (background_drives_) log_->wake();
        driver_changed_.wait_for(lock, std::chrono::microseconds(std::max<int64_t>(1, deadline - now_us())));
        continue;
      }
      driving_ = true;
      DeviceBackend* const device = busy_device();
      lock.unlock();
      drive(
          [&] {
            const std::lock_guard<std::mutex> check(mutex_);
            return !is_pending();
          },
          deadline, device);
      lock.lock();
      driving_ = false;
      driver_changed_.notify_all();
    }
    // With nothing pending no operation can hold the driver: it waits for news, or is about to let go, and is only
    // woken.
    const int64_t close_us = config_.close_timeout_ms * 1000;
    for (const int64_t limit = now_us() + close_us; driving_ && !is_pending() && now_us() < limit;) {
      log_->wake();
      driver_changed_.wait_for(lock, std::chrono::milliseconds(50));
    }
    --helpers_;
    // What is queued on a device ends as soon as the framework's own work before it has; the background thread watches.
    const int64_t device_deadline = now_us() + config_.progress_timeout_ms * 1000;
    background_wanted_.notify_one();
    while (device_busy() && !abort_.raised() && now_us() < device_deadline) {
      driver_changed_.wait_for(lock, std::chrono::milliseconds(1));
    }
    for (const int64_t limit = now_us() + close_us; driving_ && !is_pending() && now_us() < limit;) {
      driver_changed_.wait_for(lock, std::chrono::milliseconds(1));
    }
    orderly = !abort_.raised() && !device_busy();
    // It is stuck in an operation that a peer does not go on with: only the end of the epoch frees it.
    if (driving_) abort_.raise(status);
    const auto close_limit = std::chrono::steady_clock::now() + std::chrono::microseconds(close_us);
    Status stuck;
    if (!driver_changed_.wait_until(lock, close_limit, [&] { return !driving_; })) stuck = give_up_locked();
    fail_locked(status);
    stopping_ = true;
    driver_changed_.notify_all();
    background_wanted_.notify_all();
    log_->wake();
    if (stuck.ok() && !driver_changed_.wait_until(lock, close_limit, [&] { return background_over_; })) {
      stuck = give_up_locked();
    }
    if (!stuck.ok()) {
      background_.detach();
      if (region_) region_->announce_end(MemberState::aborted, farewell);
      // The thread that is stuck may hold a connection's lock: then one more is, and peers hear of it otherwise.
      if (mesh_) std::thread([this, farewell] { mesh_->announce_end(ControlKind::abort, farewell); }).detach();
      return stuck;
    }
  }
  background_.join();  // it has nothing left to do
  end_device(orderly);
  if (region_) region_->announce_end(MemberState::left, farewell);
  if (mesh_) mesh_->announce_end(ControlKind::leave, farewell);
  return {};
}

}  // namespace horovod
