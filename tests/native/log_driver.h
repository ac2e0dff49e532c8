// How tests drive an order log: they fuse up to three operations, and wait for one event after the other.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "check.h"
#include "engine/order_log.h"

namespace horovod::testing {

inline const FuseRule kThree = [](const TensorId*, size_t count) { return std::min<size_t>(count, 3); };

using Batches = std::vector<std::vector<TensorId>>;

inline LogEvent next_event(OrderLog& log) {
  LogEvent event;
  for (;;) {
    CHECK_OK(log.poll(event));
    if (event.kind != LogEvent::none) return event;
    CHECK_OK(log.wait(now_us() + 60'000'000));
  }
}

// arrive(id, random) with each of `ids` once a round, in a rank's own order and from two threads, while this thread
// drives and calls ran(ids) for each batch. The batches in their order.
template <typename Arrive, typename Ran>
Batches run_rounds(OrderLog& log, int rank, const std::vector<TensorId>& ids, int rounds, Arrive&& arrive, Ran&& ran) {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<int> done(kMaxIds, 0);
  const auto submit = [&](int seed, std::vector<TensorId> mine) {
    std::mt19937 random(static_cast<unsigned>(seed));
    for (int round = 0; round < rounds; ++round) {
      std::shuffle(mine.begin(), mine.end(), random);
      for (const TensorId id : mine) {
        {
          std::unique_lock<std::mutex> lock(mutex);
          changed.wait(lock, [&] { return done[id] == round; });
        }
        arrive(id, random);
      }
    }
  };
  const auto middle = ids.begin() + static_cast<std::ptrdiff_t>(ids.size() / 2);
  std::thread first(submit, rank * 2, std::vector<TensorId>(ids.begin(), middle));
  std::thread second(submit, rank * 2 + 1, std::vector<TensorId>(middle, ids.end()));
  Batches seen;
  for (size_t total = 0; total < ids.size() * static_cast<size_t>(rounds);) {
    const LogEvent event = next_event(log);
    CHECK(event.kind == LogEvent::batch && !event.ids.empty() && event.ids.size() <= 3);
    seen.push_back(event.ids);
    ran(event.ids);
    total += event.ids.size();
    const std::lock_guard<std::mutex> lock(mutex);
    for (const TensorId id : event.ids) ++done[id];
    changed.notify_all();
  }
  first.join();
  second.join();
  return seen;
}

}  // namespace horovod::testing
