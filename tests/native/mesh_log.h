// How tests drive an order log: they fuse up to three operations, and wait for one event after the other.
#pragma once

#include <algorithm>

#include "base/clock.h"
#include "check.h"
#include "engine/mesh_order_log.h"

namespace horovod::testing {

inline const FuseRule kThree = [](const TensorId*, size_t count) { return std::min<size_t>(count, 3); };

inline LogEvent next_event(MeshOrderLog& log) {
  LogEvent event;
  for (;;) {
    CHECK_OK(log.poll(event));
    if (event.kind != LogEvent::none) return event;
    CHECK_OK(log.wait(now_us() + 60'000'000));
  }
}

}  // namespace horovod::testing
