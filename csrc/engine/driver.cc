#include "engine/driver.h"

#include <algorithm>

#include <pthread.h>

#include "base/clock.h"
#include "base/limits.h"

namespace horovod {
namespace {

constexpr uint64_t kStartBytes = 1u << 20;  // with so many pending bytes the driver starts at once

std::chrono::microseconds until(int64_t deadline_us) {
  return std::chrono::microseconds(std::max<int64_t>(1, deadline_us - now_us()));
}

}  // namespace

void Driver::start(OrderLog& log, int cpu) {
  log_ = &log;
  background_ = std::thread([this] {
    background();
    const std::lock_guard<std::mutex> lock(mutex_);
    background_over_ = true;
    changed_.notify_all();
  });
  pthread_setname_np(background_.native_handle(), "hvd-progress");
  if (cpu >= 0) {  // the caller has checked that this process may use that processor
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    pthread_setaffinity_np(background_.native_handle(), sizeof set, &set);
  }
}

void Driver::let_go(Lock& lock, bool wake) {
  lock.unlock();
  if (wake) wake_background();
}

void Driver::submitted(Lock& lock, const OpSpec& spec, Start start) {
  ++activity_;
  start_due_ = start_due_ || start == Start::at_once;
  if (start == Start::by_waiter || driving_ || !needs_background()) return lock.unlock();
  unstarted_bytes_ += spec.bytes();
  let_go(lock, background_idle_ || start_due_ || unstarted_bytes_ >= kStartBytes);
}

void Driver::completed() {
  if (helpers_ > 1 || background_drives_) changed_.notify_all();
}

int64_t Driver::help(Lock& lock, const std::function<bool()>& done, int64_t since_us, int64_t deadline_us) {
  const Helper helper(*this);
  int64_t now = now_us();
  while (!done() && now < deadline_us) {
    if (driving_) {
      if (background_drives_) log_->wake();  // it stops at its next chance: a waiting caller is faster
      sleep(lock, deadline_us - now);
    } else {
      DeviceBackend* const device = work_.busy_device();
      const Turn turn(*this, lock, false);
      work_.set_patient(now - since_us < limits::kPatientUs);
      drive(done, now, deadline_us, device);
    }
    if (!done()) now = now_us();
  }
  return now;
}

void Driver::helped(Lock& lock) {
  ++activity_;
  if (!work_.needs_driver()) start_due_ = false;  // a thread has driven it already
  let_go(lock, farewell_due_ || (background_idle_ && (needs_background() || work_.busy_device())));
}

void Driver::left(Lock& lock) {
  ++activity_;
  start_due_ = true;
  let_go(lock, !driving_ && needs_background());
}

void Driver::watch(int64_t now_us) {
  if (now_us < watch_at_us_) return;
  watch_at_us_ = now_us + limits::kWatchUs;
  const std::lock_guard<std::mutex> lock(mutex_);
  work_.watch(now_us);
}

void Driver::drive(const std::function<bool()>& enough, int64_t now_us, int64_t deadline_us, DeviceBackend* device) {
  watch(now_us);
  for (bool in_vain = false; !enough();) {
    Status status = abort_.raised() ? abort_.cause() : log_->poll(event_);
    if (status.ok() && event_.kind == LogEvent::batch) {
      status = work_.run(event_);
      in_vain = false;
    } else if (status.ok() && event_.kind == LogEvent::withdrawn) {
      work_.withdrawn(event_.ids[0]);
    } else if (status.ok()) {
      // This is done after a wait without news, and not before the first wait, as it would slow a small operation down.
      if (in_vain || work_.watches_device()) {
        const std::lock_guard<std::mutex> lock(mutex_);
        device = work_.busy_device();
        const int64_t now = horovod::now_us();
        status = work_.overdue(now);
        if (status.ok() && now >= deadline_us) return;
      }
      if (status.ok() && device) [[unlikely]]
        status = device->tend();
      if (status.ok()) {
        const int64_t began = horovod::now_us();  // the clock is read here, where there is nothing else to do
        status = log_->wait(device ? std::min(deadline_us, began + limits::kDeviceCheckUs) : deadline_us);
        const int64_t ended = horovod::now_us();
        waited_us_.store(waited_us() + static_cast<uint64_t>(ended - began), std::memory_order_relaxed);
        watch(ended);
      }
      in_vain = true;
    }
    if (!status.ok()) return work_.end(status);
  }
}

void Driver::background() {
  Lock lock(mutex_);
  for (;;) {
    rest(lock);
    if (device_end_due_) {
      device_end_due_ = false;
      lock.unlock();
      work_.abort_device();
      lock.lock();
      continue;
    }
    if (!stopping_ && !driving_ && work_.busy_device()) {
      {
        const Turn turn(*this, lock, true);
        work_.tend_device();
      }
      if (!farewell_due_ && !needs_background()) continue;
    }
    if (farewell_due_ && !driving_) {
      farewell_due_ = false;
      const Turn turn(*this, lock, true);
      work_.linger();
      continue;
    }
    gather(lock);
    if (stopping_) return;
    if (farewell_due_ || device_end_due_ || driving_ || !needs_background()) continue;
    unstarted_bytes_ = 0;
    start_due_ = false;
    driven_activity_ = activity_;
    DeviceBackend* const device = work_.busy_device();
    const auto enough = [this] {
      const std::lock_guard<std::mutex> check(mutex_);
      return stopping_ || !needs_background();
    };
    const Turn turn(*this, lock, true);
    work_.set_patient(false);
    const int64_t now = now_us();
    drive(enough, now, now + limits::kDriveSliceUs, device);
  }
}

void Driver::rest(Lock& lock) {
  const auto wanted = [this] {
    return stopping_ || device_end_due_ || (!driving_ && (farewell_due_ || needs_background()));
  };
  background_idle_ = true;
  if (work_.busy_device()) {
    background_wanted_.wait_for(lock, std::chrono::microseconds(limits::kDeviceCheckUs), wanted);
  } else {
    background_wanted_.wait(lock, [&] { return wanted() || work_.busy_device(); });
  }
  background_idle_ = false;
}

// Small operations seldom come alone: a moment's patience makes one batch of them, or leaves them to a caller that
// waits. Large ones are worth starting at once.
void Driver::gather(Lock& lock) {
  if (start_due_ || activity_ == driven_activity_) return;  // to start at once, or it has waited for these before
  gathers_.fetch_add(1, std::memory_order_relaxed);
  const int64_t limit_us = now_us() + limits::kGatherMostUs;
  int64_t slice_us = limits::kGatherUs;
  for (bool more = true; more; slice_us = limits::kGatherAgainUs) {
    const uint64_t seen = activity_;
    const bool enough = background_wanted_.wait_for(lock, std::chrono::microseconds(slice_us), [&] {
      const bool start = start_due_ || unstarted_bytes_ >= kStartBytes;
      return stopping_ || farewell_due_ || device_end_due_ || (start && !driving_);
    });
    more = !enough && activity_ != seen && now_us() < limit_us;
  }
}

bool Driver::wait_idle(Lock& lock, int64_t deadline_us) {
  return changed_.wait_for(lock, until(deadline_us), [this] { return !driving_; });
}

bool Driver::stop(Lock& lock, int64_t deadline_us) {
  stopping_ = true;
  changed_.notify_all();
  background_wanted_.notify_all();
  log_->wake();
  return changed_.wait_for(lock, until(deadline_us), [this] { return background_over_; });
}

}  // namespace horovod
