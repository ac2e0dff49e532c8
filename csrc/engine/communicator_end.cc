// How a communicator ends: with the epoch, because of a peer or the abort signal, or in order.
#include <thread>

#include "base/limits.h"
#include "engine/communicator.h"

namespace horovod {

Status Communicator::with_context(const Status& status, const Submission& submission) const {
  const std::string which =
      submission.unnamed ? ", number " + std::to_string(*submission.unnamed + 1) + " of that name" : "";
  return {status.code(), with_more(status.message(), " (Rank " + members_.own_rank() + " was running " +
                                                         submission.spec.name + which + ".)")};
}

void Communicator::end(const Status& status) {
  {
    const std::lock_guard<std::mutex> lock(driver_.mutex());
    fail_locked(status);
    driver_.wake_waiting();
  }
  if (status.code() != Code::left) abort_.raise(status);  // ends the epoch for all communicators, here and on all ranks
  if (!abort_.raised()) return;
  on_abort_();
  if (!mesh_) return;
  const std::lock_guard<std::mutex> lock(driver_.mutex());
  driver_.bid_farewell();
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
    const std::lock_guard<std::mutex> lock(driver_.mutex());
    if (log_ && device_.backend()) driver_.end_device();
    // To end the work on the device may take until other communicators have ended theirs, and the caller has yet to
    // tell them. So another thread does it.
    if (!log_ && device_.backend() && closed_.ok() && !device_ending_.joinable())
      device_ending_ = std::thread([this] { device_.end(false); });
  }
  if (!log_) return;
  driver_.wake_background();
  const std::string cause = abort_.cause().message();
  if (region_) region_->announce_end(MemberState::aborted, cause);
  if (mesh_) mesh_->announce_end(ControlKind::abort, cause);
  log_->wake();
}

// A thread is in an operation and does not notice that the epoch is over.
void Communicator::give_up_locked() {
  std::string what;
  for (const auto& [submission, owner] : table_.in_flight()) {
    stuck_operations_.push_back(owner);
    if (what.empty() && submission->running.load(std::memory_order_relaxed)) what = submission->spec.name;
  }
  if (what.empty()) what = "an operation";
  stuck_ = {Code::timeout, error_code::stuck_thread,
            capitalized(members_.labels[rank()]) +
                " has ended its part of the world, but a thread of it is still in the middle of " + what + " after " +
                std::to_string(config_.close_timeout_ms) +
                " ms and does not look up: the memory of a tensor may be a file on a file system that does not answer, "
                "or a debugger holds the thread. What it may use is kept until the process ends."};
}

Status Communicator::close_alone(const std::string& why) {
  {
    const std::lock_guard<std::mutex> lock(driver_.mutex());
    if (!closed_.ok()) return {};
    closed_ = {Code::aborted, why};
  }
  device_.end_alone(!abort_.raised());
  if (device_ending_.joinable()) device_ending_.join();
  return {};
}

Status Communicator::close(const std::string& farewell, const std::string& why) {
  if (!log_) return close_alone(why);
  bool orderly = false;
  const Status status(Code::aborted, with_more(why, " The operation was not finished by all ranks before."));
  {
    Driver::Lock lock(driver_.mutex());
    if (!closed_.ok()) return stuck_;
    closed_ = {Code::aborted, why};
    join_.close();
    table_.close(status, effects_);
    apply_effects();
    const int64_t close_us = config_.close_timeout_ms * 1000;
    {
      const Driver::Helper helper(driver_);
      const int64_t now = now_us();
      const auto finished = [&] {
        const Driver::Lock check = lock ? Driver::Lock() : Driver::Lock(driver_.mutex());
        return !is_pending() || !ended_.ok();
      };
      driver_.help(lock, finished, now, now + limits::kCloseUs);
      // With nothing pending no operation can hold the driver: it waits for news, or is about to let go, and is only
      // woken.
      for (const int64_t limit = now_us() + close_us; driver_.is_driving() && !is_pending() && now_us() < limit;) {
        log_->wake();
        driver_.sleep(lock, limits::kCloseWakeUs);
      }
    }
    // What is queued on a device ends as soon as the framework's own work before it has; the background thread watches.
    const int64_t device_deadline = now_us() + config_.progress_timeout_ms * 1000;
    driver_.wake_background();
    while (busy_device() && !abort_.raised() && now_us() < device_deadline) driver_.sleep(lock, limits::kCloseLookUs);
    if (!is_pending()) driver_.wait_idle(lock, now_us() + close_us);
    orderly = !abort_.raised() && !busy_device();
    // The driver is stuck in an operation with which a peer does not go on: only the end of the epoch frees it.
    if (driver_.is_driving()) abort_.raise(status);
    const int64_t close_limit = now_us() + close_us;
    if (!driver_.wait_idle(lock, close_limit)) give_up_locked();
    fail_locked(status);
    const bool over = driver_.stop(lock, stuck_.ok() ? close_limit : 0);
    if (stuck_.ok() && !over) give_up_locked();
    if (!stuck_.ok()) {
      driver_.detach();
      if (region_) region_->announce_end(MemberState::aborted, farewell);
      // The stuck thread may hold a connection's lock. Then this thread gets stuck too, and peers learn of the end
      // otherwise.
      if (mesh_) {
        std::thread([this, farewell] {
          mesh_->announce_end(ControlKind::abort, farewell);
          (void)mesh_->hand_over(false);
        }).detach();
      }
      return stuck_;
    }
  }
  driver_.join();  // the background thread has nothing left to do
  device_.end(orderly);
  if (region_) region_->announce_end(MemberState::left, farewell);
  if (!mesh_) return {};
  mesh_->announce_end(ControlKind::leave, farewell);
  // Waits until the sockets have taken all results and batches as well: a peer may be slow, or this rank fast.
  if (orderly) mesh_->linger(limits::kFarewellUs);
  return {};
}

}  // namespace horovod
