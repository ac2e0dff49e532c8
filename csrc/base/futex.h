// The kernel's wait-on-address (futex(2)), which works between processes on shared memory.
#pragma once

#include <atomic>
#include <climits>
#include <cstdint>
#include <ctime>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace horovod {

// Sleeps while *word == expected, at most timeout_us. May return early for no reason.
inline void futex_wait(const std::atomic<uint32_t>* word, uint32_t expected, int64_t timeout_us) {
  const timespec timeout{timeout_us / 1'000'000, (timeout_us % 1'000'000) * 1000};
  syscall(SYS_futex, word, FUTEX_WAIT, expected, &timeout, nullptr, 0);
}

inline void futex_wake_all(const std::atomic<uint32_t>* word) {
  syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// One turn of a polling loop.
inline void cpu_pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

}  // namespace horovod
