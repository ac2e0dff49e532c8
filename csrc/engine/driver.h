// Chooses the thread that drives: it polls the order log and runs what the log says. One thread drives at a time.
//
// The driver is whichever thread has the Turn. A caller that waits for a result helps: it drives itself, so no result
// is handed over to another thread on the critical path. While no caller helps but operations are in flight, the
// background thread drives. It also looks after devices every few milliseconds, because callers don't wait for them and
// no other thread would notice a failure there, and sees to it that peers are told why an epoch has ended.
//
// The driver owns the lock of its communicator. It is not held while a batch runs or a thread sleeps in the log.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>

#include "base/abort.h"
#include "collectives/backend.h"
#include "collectives/op_spec.h"
#include "engine/order_log.h"
#include "engine/submission.h"

namespace horovod {

class Driver {
 public:
  using Lock = std::unique_lock<std::mutex>;

  // The work that is driven. The first four are called with the lock held, the others by the driver without it.
  class Work {
   public:
    virtual ~Work() = default;
    // Whether a thread has to drive although no caller may be waiting.
    virtual bool needs_driver() = 0;
    // Where something is queued that will pass; or null.
    virtual DeviceBackend* busy_device() = 0;
    // Why nothing more will come from the log, though it is silent; or ok.
    virtual Status overdue(int64_t now_us) = 0;
    // Called now and then (limits::kWatchUs) while something is in flight.
    virtual void watch(int64_t now_us) = 0;

    virtual Status run(const LogEvent& batch) = 0;
    virtual void withdrawn(TensorId id) = 0;
    virtual void end(const Status& why) = 0;
    virtual bool watches_device() = 0;  // whether something may be under way on a device
    virtual void tend_device() = 0;
    virtual void abort_device() = 0;
    virtual void linger() = 0;  // waits a while, until peers know of the end
    virtual void set_patient(bool patient) = 0;
  };

  // A caller is about to help, so the background thread need not drive. With the lock held.
  class Helper {
   public:
    explicit Helper(Driver& driver) : driver_(driver) { ++driver_.helpers_; }
    ~Helper() { --driver_.helpers_; }
    Helper(const Helper&) = delete;
    Helper& operator=(const Helper&) = delete;

   private:
    Driver& driver_;
  };

  Driver(Work& work, AbortSignal& abort) : work_(work), abort_(abort) {}

  std::mutex& mutex() { return mutex_; }
  // Called before the first operation. cpu: where the background thread runs; negative: anywhere.
  void start(OrderLog& log, int cpu);

  // An operation was submitted. Releases the lock.
  void submitted(Lock& lock, const OpSpec& spec, Start start);
  void wake_background() { background_wanted_.notify_one(); }
  // The driver has completed operations: threads that wait for them look again.
  void completed();
  // Something else has changed that a thread in help() or sleep() may wait for.
  void wake_waiting() { changed_.notify_all(); }

  // Drives, or waits while another thread does, until done() or the deadline; returns what time it is. done() is asked
  // with and without the lock. since_us: when the caller first waited for the same.
  int64_t help(Lock& lock, const std::function<bool()>& done, int64_t since_us, int64_t deadline_us);
  // A caller that has helped stops. Releases the lock.
  void helped(Lock& lock);
  // An operation that a thread has waited for is left to the background thread, which begins at once: it was started a
  // while ago. Lets go of the lock.
  void left(Lock& lock);
  // Sleeps until operations are completed or the driver has changed.
  void sleep(Lock& lock, int64_t us) { changed_.wait_for(lock, std::chrono::microseconds(us)); }
  // How long the log had no news for the driver: this member waited for others to start what it had started.
  uint64_t waited_us() const { return waited_us_.load(std::memory_order_relaxed); }

  // How often the background thread has waited for more operations before it drove.
  uint64_t gathers() const { return gathers_.load(std::memory_order_relaxed); }
  bool is_driving() const { return driving_; }
  // The epoch was aborted: the background thread is to tell the peers why.
  void bid_farewell() {
    farewell_due_ = true;
    wake_background();
  }
  // The epoch was aborted: the background thread is to end what runs on the device.
  void end_device() { device_end_due_ = true; }
  // Waits until no thread drives; false when the time is over.
  bool wait_idle(Lock& lock, int64_t deadline_us);
  // Ends the background thread; false when the time is over, and then it is left alone.
  bool stop(Lock& lock, int64_t deadline_us);
  void join() { background_.join(); }  // after stop() was true; without the lock
  void detach() { background_.detach(); }

 private:
  // While it lives the calling thread is the driver, and does not hold the lock.
  class Turn {
   public:
    Turn(Driver& driver, Lock& lock, bool background) : driver_(driver), lock_(lock) {
      driver_.driving_ = true;
      driver_.background_drives_ = background;
      lock_.unlock();
    }
    ~Turn() {
      lock_.lock();
      driver_.driving_ = driver_.background_drives_ = false;
      driver_.changed_.notify_all();
    }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    Driver& driver_;
    Lock& lock_;
  };

  // device: busy_device() by now.
  void drive(const std::function<bool()>& enough, int64_t now_us, int64_t deadline_us, DeviceBackend* device);
  void watch(int64_t now_us);
  // Without the lock, so that the background thread does not wake up to wait for it.
  void let_go(Lock& lock, bool wake);
  bool needs_background() { return helpers_ == 0 && work_.needs_driver(); }
  void background();
  void rest(Lock& lock);
  void gather(Lock& lock);

  Work& work_;
  AbortSignal& abort_;
  OrderLog* log_ = nullptr;
  LogEvent event_;                      // the driver's
  int64_t watch_at_us_ = 0;             // driver only: when to look for operations that are in flight for long
  std::atomic<uint64_t> waited_us_{0};  // a statistic that only the driver writes; any order

  std::mutex mutex_;      // guards everything down to the condition variables, and what is driven
  int helpers_ = 0;       // threads inside help()
  bool driving_ = false;  // some thread is the driver
  bool background_drives_ = false;
  bool background_idle_ = false;  // the background thread waits for work
  bool farewell_due_ = false;
  bool device_end_due_ = false;
  bool start_due_ = false;        // an operation that starts at once came since the background thread last drove
  uint64_t unstarted_bytes_ = 0;  // submitted without a waiting caller since the background thread last drove
  uint64_t activity_ = 0;         // counts submissions and finished waits: signs of active callers
  uint64_t driven_activity_ = 0;  // what that was when the background thread last began to drive
  bool stopping_ = false;
  bool background_over_ = false;     // the background thread uses nothing of this object any more
  std::condition_variable changed_;  // the driver let go, or operations completed
  // needs_background(), busy_device(), farewell_due_, device_end_due_ or stopping_ became true
  std::condition_variable background_wanted_;
  std::atomic<uint64_t> gathers_{0};  // statistics; any order
  std::thread background_;
};

}  // namespace horovod
