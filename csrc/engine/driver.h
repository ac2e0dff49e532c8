// Chooses the thread that drives: it polls the order log and runs what the log says. One thread drives at a time.
//
// The driver is the thread that holds the Turn. A caller that waits for a result helps: it drives itself, so no result
// is handed over to another thread on the critical path. While no caller helps but operations are in flight, the
// background thread drives. The background thread also looks after devices every few milliseconds, because callers
// don't wait for them and no other thread would notice a failure there; and it tells peers why an epoch has ended.
//
// The Driver object holds the lock of its communicator. No thread holds that lock while a batch runs, or while it
// sleeps in the log.
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
    // The device where work is queued that will end by itself; null where there is none.
    virtual DeviceBackend* busy_device() = 0;
    // Not ok where the log is silent because nothing more can come from it; the status says why.
    virtual Status overdue(int64_t now_us) = 0;
    // Called now and then (limits::kWatchUs) while something is in flight.
    virtual void watch(int64_t now_us) = 0;

    virtual Status run(const LogEvent& batch) = 0;
    virtual void withdrawn(TensorId id) = 0;
    virtual void end(const Status& why) = 0;
    virtual bool watches_device() = 0;  // whether something may be under way on a device
    virtual void tend_device() = 0;
    virtual void abort_device() = 0;
    virtual void linger() = 0;  // waits until peers know that the epoch has ended, but not for long
    virtual void set_patient(bool patient) = 0;
  };

  // Lives while a caller helps or is about to, so that the background thread need not drive. Made with the lock held.
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

  // Says that an operation was submitted. Releases the lock.
  void submitted(Lock& lock, const OpSpec& spec, Start start);
  void wake_background() { background_wanted_.notify_one(); }
  // Wakes the threads that wait for operations, because the driver has completed some.
  void completed();
  // Wakes the threads in help() and sleep(), because something else has changed that they may wait for.
  void wake_waiting() { changed_.notify_all(); }

  // Drives, or waits while another thread does, until done() or the deadline; returns what time it is. done() is asked
  // with and without the lock. since_us: when the caller first waited for the same.
  int64_t help(Lock& lock, const std::function<bool()>& done, int64_t since_us, int64_t deadline_us);
  // Says that a caller which has helped does so no more. Releases the lock.
  void helped(Lock& lock);
  // Leaves an operation that a thread has waited for to the background thread, which begins at once because the
  // operation was started a while ago. Releases the lock.
  void left(Lock& lock);
  // Sleeps until operations are completed or the driver has changed.
  void sleep(Lock& lock, int64_t us) { changed_.wait_for(lock, std::chrono::microseconds(us)); }
  // For how long in all the driver has waited for other members to start operations that this member had started.
  uint64_t waited_us() const { return waited_us_.load(std::memory_order_relaxed); }

  // How often the background thread has waited for more operations before it drove.
  uint64_t gathers() const { return gathers_.load(std::memory_order_relaxed); }
  bool is_driving() const { return driving_; }
  // Makes the background thread tell the peers why the epoch was aborted.
  void bid_farewell() {
    farewell_due_ = true;
    wake_background();
  }
  // Makes the background thread end what runs on the device, because the epoch was aborted.
  void end_device() { device_end_due_ = true; }
  // Waits until no thread drives; false when the time is over.
  bool wait_idle(Lock& lock, int64_t deadline_us);
  // Ends the background thread. False when it has not ended in that time; it then goes on.
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

  // device: the present answer of busy_device().
  void drive(const std::function<bool()>& enough, int64_t now_us, int64_t deadline_us, DeviceBackend* device);
  void watch(int64_t now_us);
  // Called without the lock, so that the background thread does not wake up only to wait for the lock.
  void let_go(Lock& lock, bool wake);
  bool needs_background() { return helpers_ == 0 && work_.needs_driver(); }
  void background();
  void rest(Lock& lock);
  void gather(Lock& lock);

  Work& work_;
  AbortSignal& abort_;
  OrderLog* log_ = nullptr;
  LogEvent event_;           // the driver's
  int64_t watch_at_us_ = 0;  // driver only: when to look next for operations that have been in flight for long
  std::atomic<uint64_t> waited_us_{0};  // a statistic that only the driver writes; any order

  std::mutex mutex_;      // guards everything down to the condition variables, and what is driven
  int helpers_ = 0;       // threads inside help()
  bool driving_ = false;  // some thread is the driver
  bool background_drives_ = false;
  bool background_idle_ = false;  // the background thread waits for work
  bool farewell_due_ = false;
  bool device_end_due_ = false;
  bool start_due_ = false;        // an operation that starts at once came since the background thread last drove
  uint64_t unstarted_bytes_ = 0;  // bytes submitted without a waiting caller since the background thread last drove
  uint64_t activity_ = 0;         // counts submissions and finished waits: signs of active callers
  uint64_t driven_activity_ = 0;  // activity_ when the background thread last began to drive
  bool stopping_ = false;
  bool background_over_ = false;     // the background thread does not use this object any more
  std::condition_variable changed_;  // the driver let go, or operations completed
  // needs_background(), busy_device(), farewell_due_, device_end_due_ or stopping_ became true
  std::condition_variable background_wanted_;
  std::atomic<uint64_t> gathers_{0};  // statistics; any order
  std::thread background_;
};

}  // namespace horovod
