// How a thread of the engine waits for what another thread, process or device makes true.
//
// A wait has up to three phases. The thread first spins: it looks again and again and keeps its processor, because most
// of what it waits for comes within microseconds. Then it yields: it gives the processor away before each look, which
// lets ranks that share a processor go on, and it still notices sooner than a sleeper is woken. At last it sleeps: on a
// futex, in poll(2), or in naps where nothing can wake it (a device, NCCL). A WaitPolicy says how long each phase is;
// base/limits.h has the policies and every other time limit. Nothing else in csrc yields, naps or waits on a futex.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <ctime>

#include <sched.h>

#include "base/clock.h"
#include "base/futex.h"

namespace horovod {

struct WaitPolicy {
  int64_t spin_us = 0;   // the first phase
  int64_t yield_us = 0;  // both first phases together; less than spin_us: there is no second one
  // The third phase, where the thread naps: so long at first, and longer the longer it has waited.
  int64_t nap_us = 0;
  int64_t longest_nap_us = 0;
  // While it spins: looks between two looks at the clock, and whether it yields once at each look at the clock.
  int spins = 64;
  bool yields_between = true;
};

inline void yield_processor() { sched_yield(); }

// Sleeps for so long, whatever happens.
inline void nap(int64_t us) {
  const timespec length{us / 1'000'000, us % 1'000'000 * 1000};
  nanosleep(&length, nullptr);
}

// One wait, turn by turn, for a caller that does something else at each turn. Time is an argument, so that the clock is
// read once in a turn.
class Wait {
 public:
  enum Phase : uint8_t { spins, yields, sleeps };

  explicit Wait(const WaitPolicy& policy) : policy_(policy) {}

  // The first call begins the wait.
  Phase phase(int64_t now_us) {
    if (began_us_ == 0) began_us_ = now_us;
    const int64_t waited_us = now_us - began_us_;
    return waited_us < policy_.spin_us ? spins : waited_us < policy_.yield_us ? yields : sleeps;
  }
  // The wait has brought something: the next turn begins another wait.
  void restart() { began_us_ = 0; }

  int64_t nap_us(int64_t now_us) const {
    // Naps last this part of the time waited so far: to notice that much too late does no harm.
    constexpr int64_t kPart = 16;
    return std::max(policy_.nap_us, std::min(policy_.longest_nap_us, policy_.nap_us + (now_us - began_us_) / kPart));
  }
  // A turn with nothing to do but wait.
  void turn(int64_t now_us) {
    switch (phase(now_us)) {
      case spins:
        return cpu_pause();
      case yields:
        return yield_processor();
      case sleeps:
        return nap(nap_us(now_us));
    }
  }

 private:
  WaitPolicy policy_;
  int64_t began_us_ = 0;
};

// The first two phases, for a caller that then sleeps on what wakes it: until ready(), whose last answer it returns.
// `now_us` is the time when it begins, and afterwards the time when it last read the clock. yields_early(): whether the
// thread yields although it may still spin; asked after each look at the clock.
template <typename Ready, typename YieldsEarly>
bool poll_until(const WaitPolicy& policy, int64_t& now_us, int64_t deadline_us, Ready&& ready,
                YieldsEarly&& yields_early) {
  constexpr int kYields = 4;  // polls between two looks at the clock
  const int64_t spin_end = std::min(deadline_us, now_us + policy.spin_us);
  const int64_t end = std::min(deadline_us, now_us + std::max(policy.spin_us, policy.yield_us));
  while (now_us < end) {
    const bool yields = now_us >= spin_end || yields_early();
    for (int turn = yields ? kYields : policy.spins; turn > 0; --turn) {
      if (yields) {
        yield_processor();
      } else {
        cpu_pause();
      }
      if (ready()) return true;
    }
    if (!yields && policy.yields_between) yield_processor();
    now_us = horovod::now_us();
  }
  return false;
}

// Sleeps on a futex until ready() or the deadline; returns ready()'s last answer. The thread that makes ready() true
// then changes `word` and wakes its sleepers. asleep() is called before each sleep.
template <typename Ready, typename Asleep>
bool sleep_on(const std::atomic<uint32_t>& word, int64_t deadline_us, Ready&& ready, Asleep&& asleep) {
  for (;;) {
    const uint32_t seen = word.load(std::memory_order_acquire);
    std::atomic_thread_fence(
        std::memory_order_seq_cst);  // with the waker's between its store and its look for sleepers
    if (ready()) return true;
    const int64_t now = now_us();
    if (now >= deadline_us) return false;
    asleep();
    futex_wait(&word, seen, deadline_us - now);
  }
}

// All three phases, where the event itself can't wake a thread: until ready() or the deadline; returns ready()'s last
// answer.
template <typename Ready>
bool wait_until(const WaitPolicy& policy, int64_t deadline_us, Ready&& ready) {
  Wait wait(policy);
  while (!ready()) {
    const int64_t now = now_us();
    if (now >= deadline_us) return false;
    wait.turn(now);
  }
  return true;
}

}  // namespace horovod
