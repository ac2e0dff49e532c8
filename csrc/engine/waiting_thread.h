// Counts the threads of the script that wait for operations, to tell whether any thread is left that could start one. A
// thread that has waited or polled before is expected to submit again while it is not blocked.
#pragma once

#include <atomic>

namespace horovod {

class WaitingThread {
 public:
  // A wait of the calling thread, from construction to destruction.
  class Wait {
   public:
    Wait() { count(); }
    Wait(const Wait&) = delete;
    Wait& operator=(const Wait&) = delete;
    ~Wait() {
      if (blocked_) blocked_threads_.fetch_sub(1, std::memory_order_relaxed);
    }
    // The wait has lasted a while.
    void blocked() {
      if (!blocked_) blocked_threads_.fetch_add(1, std::memory_order_relaxed);
      blocked_ = true;
    }

   private:
    bool blocked_ = false;
  };

  // The calling thread waits for operations, or polls.
  static void count() {
    if (!t_stands_in) t_registered.count();
  }

  // From now on the calling thread runs (or no longer runs) a call for which another thread waits that may have waited
  // here before. Both are blocked when this one is, so that its waits are counted in the place of the other's.
  static void stand_in(bool does) { t_stands_in = does; }

  // Every living thread that was counted is blocked. A forked child inherits the numbers of threads that it does
  // not have; there this may never be true.
  static bool all_blocked() {
    const int blocked = blocked_threads_.load(std::memory_order_relaxed);
    return blocked > 0 && blocked >= threads_.load(std::memory_order_relaxed);
  }

 private:
  // Counts when it is told to, and not when it is made: a thread that uses one variable of its own gets all of them
  // that are defined in the same compilation.
  struct Registered {
    bool counted = false;
    void count() {
      if (!counted) threads_.fetch_add(1, std::memory_order_relaxed);
      counted = true;
    }
    ~Registered() {
      if (counted) threads_.fetch_sub(1, std::memory_order_relaxed);
    }
  };

  // Statistics: each thread adds and takes away its own part, nothing is ordered by them. A reader that sees a thread
  // between two states is put right by the next report.
  inline static std::atomic<int> threads_{0}, blocked_threads_{0};
  static thread_local Registered t_registered;
  inline static thread_local bool t_stands_in = false;
};

inline thread_local WaitingThread::Registered WaitingThread::t_registered;

}  // namespace horovod
