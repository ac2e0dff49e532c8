// What the kernel allows when ranks outnumber processors: processes that meet at a barrier in shared memory, over and
// over, each doing some work in between. No library takes part: collectives whose ranks do no better than to yield, or
// to sleep, can't be faster than this.
//
//     g++ -O2 -o /tmp/handover benchmarks/handover.cc && /tmp/handover 4 3
//
// Arguments: processes, and microseconds of work between two barriers (what a call costs in Python). Prints the median
// time of a turn and the mean, for processes of one session and of one session each, that yield or sleep while they
// wait, without and with one process beside them that only computes.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

namespace {

constexpr int kWarmUp = 2'000, kTurns = 20'000;

struct Shared {
  alignas(64) std::atomic<uint32_t> arrived;
  alignas(64) std::atomic<uint32_t> turn;  // futex word; its store is what the others wait for
  double microseconds[kTurns];             // of each turn, seen by the first process
};

double now_us() {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void meet(Shared& shared, uint32_t processes, bool sleep) {
  const uint32_t turn = shared.turn.load();
  if (shared.arrived.fetch_add(1) + 1 == processes) {
    shared.arrived.store(0);
    shared.turn.store(turn + 1);
    if (sleep) syscall(SYS_futex, &shared.turn, FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0);
    return;
  }
  while (shared.turn.load() == turn) {
    if (sleep) {
      syscall(SYS_futex, &shared.turn, FUTEX_WAIT, turn, nullptr, nullptr, 0);
    } else {
      sched_yield();
    }
  }
}

void member(Shared& shared, uint32_t processes, double work_us, bool sleep, bool first) {
  double last = now_us();
  for (int turn = -kWarmUp; turn < kTurns; ++turn) {
    for (const double end = now_us() + work_us; work_us > 0 && now_us() < end;) continue;
    meet(shared, processes, sleep);
    const double now = now_us();
    if (first && turn >= 0) shared.microseconds[turn] = now - last;
    last = now;
  }
}

void measure(uint32_t processes, double work_us, bool own_sessions, bool sleep, bool stranger) {
  void* memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) std::exit((std::perror("mmap"), 1));
  Shared& shared = *static_cast<Shared*>(memory);
  pid_t beside = -1;
  if (stranger && (beside = fork()) == 0) {
    setsid();
    for (volatile uint64_t spin = 0;; spin = spin + 1) continue;
  }
  std::vector<pid_t> members;
  for (uint32_t rank = 0; rank < processes; ++rank) {
    const pid_t pid = fork();
    if (pid < 0) std::exit((std::perror("fork"), 1));
    if (pid == 0) {
      if (own_sessions) setsid();
      member(shared, processes, work_us, sleep, rank == 0);
      _exit(0);
    }
    members.push_back(pid);
  }
  for (pid_t pid : members) waitpid(pid, nullptr, 0);
  if (beside > 0) {
    kill(beside, SIGKILL);
    waitpid(beside, nullptr, 0);
  }
  double sum = 0;
  for (double turn : shared.microseconds) sum += turn;
  std::nth_element(shared.microseconds, shared.microseconds + kTurns / 2, shared.microseconds + kTurns);
  std::printf("%-15s %-6s %-10s median %7.1f us   mean %8.1f us\n", own_sessions ? "own sessions" : "one session",
              sleep ? "sleep" : "yield", stranger ? "disturbed" : "alone", shared.microseconds[kTurns / 2],
              sum / kTurns);
  std::fflush(stdout);
  munmap(memory, sizeof(Shared));
}

}  // namespace

int main(int count, char** arguments) {
  const int processes = count > 1 ? std::atoi(arguments[1]) : 4;
  const double work_us = count > 2 ? std::atof(arguments[2]) : 3;
  if (processes < 2 || processes > 1024 || work_us < 0) {
    std::fprintf(stderr, "usage: handover [processes >= 2] [microseconds of work >= 0]\n");
    return 2;
  }
  for (const bool stranger : {false, true}) {
    for (const bool own_sessions : {false, true}) {
      for (const bool sleep : {false, true}) {
        measure(static_cast<uint32_t>(processes), work_us, own_sessions, sleep, stranger);
      }
    }
  }
  return 0;
}
