// The phases of a wait, with the time as an argument, and what ends it.
#include "base/wait.h"

#include <atomic>
#include <thread>

#include "base/limits.h"
#include "check.h"
#include "named_tests.h"

using namespace horovod;
using namespace horovod::testing;

namespace {

constexpr int64_t kFar = INT64_MAX;

void test_phases_follow_each_other() {
  Wait wait({.spin_us = 50, .yield_us = 2'000});
  CHECK(wait.phase(1'000'000) == Wait::spins);  // the first look begins the wait, whenever that is
  CHECK(wait.phase(1'000'049) == Wait::spins);
  CHECK(wait.phase(1'000'050) == Wait::yields);
  CHECK(wait.phase(1'001'999) == Wait::yields);
  CHECK(wait.phase(1'002'000) == Wait::sleeps);
  wait.restart();
  CHECK(wait.phase(5'000'000) == Wait::spins);
}

void test_a_phase_may_be_empty() {
  Wait yields_at_once({.yield_us = 10});
  CHECK(yields_at_once.phase(1) == Wait::yields && yields_at_once.phase(11) == Wait::sleeps);
  Wait sleeps_at_once(limits::kDeviceEndWait);
  CHECK(sleeps_at_once.phase(1) == Wait::sleeps);
  Wait never_yields({.spin_us = 50, .yield_us = 10});
  CHECK(never_yields.phase(1) == Wait::spins && never_yields.phase(51) == Wait::sleeps);
}

void test_naps_grow_up_to_the_longest() {
  Wait wait({.nap_us = 50, .longest_nap_us = 500});
  CHECK(wait.phase(1'000) == Wait::sleeps);
  CHECK(wait.nap_us(1'000) == 50);
  CHECK(wait.nap_us(1'000 + 1'600) == 150);
  CHECK(wait.nap_us(1'000 + 1'000'000) == 500);
  Wait steady({.nap_us = 200});
  CHECK(steady.phase(1) == Wait::sleeps && steady.nap_us(1'000'000) == 200);
}

void test_polling_ends_with_what_it_waits_for() {
  int looks = 0;
  int64_t now = now_us();
  CHECK(poll_until({.spin_us = 60'000'000}, now, kFar, [&] { return ++looks == 1000; }, [] { return false; }));
  CHECK(looks == 1000);
  looks = 0;
  CHECK(poll_until({.yield_us = 60'000'000}, now, kFar, [&] { return ++looks == 10; }, [] { return false; }));
  CHECK(looks == 10);
}

void test_polling_ends_with_the_policy_and_the_deadline() {
  const auto never = [] { return false; };
  int64_t now = now_us();
  const int64_t began = now;
  CHECK(!poll_until({.spin_us = 100, .yield_us = 200}, now, kFar, never, never));
  CHECK(now >= began + 200);
  CHECK(!poll_until({.spin_us = 60'000'000}, now, now + 100, never, never));
  CHECK(!poll_until({}, now, kFar, never, never));
}

void test_the_clock_is_read_less_often_where_a_thread_may_spin() {
  int asked = 0, looks = 0;
  int64_t now = now_us();
  const WaitPolicy policy{.spin_us = 60'000'000, .yield_us = 60'000'000, .spins = 8};
  // It spins, then yields early, four looks at a time.
  CHECK(poll_until(policy, now, kFar, [&] { return ++looks == 8 + 4 + 1; }, [&] { return asked++ == 1; }));
  CHECK(asked == 3);
}

void test_a_sleeper_is_woken() {
  std::atomic<uint32_t> word{0};
  std::atomic<bool> asleep{false};
  bool came = false;
  std::thread sleeper(
      [&] { came = sleep_on(word, kFar, [&] { return word.load() == 1; }, [&] { asleep.store(true); }); });
  while (!asleep.load()) yield_processor();
  word.store(1);
  futex_wake_all(&word);
  sleeper.join();
  CHECK(came);
}

void test_a_sleeper_has_a_deadline() {
  const std::atomic<uint32_t> word{0};
  int slept = 0;
  const int64_t deadline = now_us() + 1'000;
  CHECK(!sleep_on(word, deadline, [] { return false; }, [&] { ++slept; }));
  CHECK(now_us() >= deadline && slept > 0);
  CHECK(!sleep_on(word, 0, [] { return false; }, [] { CHECK(false, "it is past the deadline"); }));
  CHECK(sleep_on(word, 0, [] { return true; }, [] {}), "what is there comes before the deadline");
}

void test_naps_end_with_what_they_wait_for_and_with_the_deadline() {
  int looks = 0;
  CHECK(wait_until({.nap_us = 1}, kFar, [&] { return ++looks == 5; }));
  CHECK(looks == 5);
  const int64_t deadline = now_us() + 1'000;
  CHECK(!wait_until({.spin_us = 100, .yield_us = 200, .nap_us = 10}, deadline, [] { return false; }));
  CHECK(now_us() >= deadline);
}

constexpr NamedTest kTests[] = {
    {"phases follow each other", test_phases_follow_each_other},
    {"a phase may be empty", test_a_phase_may_be_empty},
    {"naps grow up to the longest", test_naps_grow_up_to_the_longest},
    {"polling ends with what it waits for", test_polling_ends_with_what_it_waits_for},
    {"polling ends with the policy and the deadline", test_polling_ends_with_the_policy_and_the_deadline},
    {"the clock is read less often where a thread may spin", test_the_clock_is_read_less_often_where_a_thread_may_spin},
    {"a sleeper is woken", test_a_sleeper_is_woken},
    {"a sleeper has a deadline", test_a_sleeper_has_a_deadline},
    {"naps end with what they wait for and with the deadline",
     test_naps_end_with_what_they_wait_for_and_with_the_deadline},
};

}  // namespace

int main(int argc, char** argv) { return run_named(argc, argv, kTests); }
