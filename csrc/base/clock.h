// Monotonic time; nothing in the engine reads the wall clock, so clocks that jump do no harm.
#pragma once

#include <cstdint>
#include <ctime>

namespace horovod {

inline int64_t now_us() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<int64_t>(now.tv_sec) * 1'000'000 + now.tv_nsec / 1000;
}

}  // namespace horovod
