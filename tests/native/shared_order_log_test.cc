// The order log of members that share memory: ranks submit and take back in random order from several threads, for more
// than a lap of the ring, and agree all the same.
#include "engine/shared_order_log.h"

#include <algorithm>
#include <atomic>
#include <random>
#include <vector>

#include "check.h"
#include "collectives/operation.h"
#include "hosts_world.h"
#include "log_driver.h"
#include "named_tests.h"

using namespace horovod;
using namespace horovod::testing;

namespace {

struct OneHost : HostsWorld {
  explicit OneHost(int n) : HostsWorld(std::vector<int>(static_cast<size_t>(n), 0)) {}

  SharedOrderLog log(int rank) { return {*regions[rank], kThree, aborts[rank]}; }
};

void arrive(SharedOrderLog& log, TensorId id, bool waited_for) {
  Operation operation;
  operation.waited_for = waited_for;
  CHECK_OK(log.arrive_with(id, operation));
}

Batches all_batches(SharedOrderLog& log) {
  Batches found;
  LogEvent event;
  for (;;) {
    CHECK_OK(log.poll(event));
    if (event.kind == LogEvent::none) return found;
    CHECK(event.kind == LogEvent::batch);
    found.push_back(event.ids);
  }
}

// An operation that its caller waits for, and that begins a batch, is one by itself, whatever comes behind it before
// anybody looks. Whose caller it is that counts: the last one's to arrive, as any other may be ahead.
void test_waited_for() {
  struct Step {
    TensorId id;
    bool waited_for;
  };
  const auto batches = [](const std::vector<Step>& steps, bool at_first_too) {
    OneHost world(2);
    SharedOrderLog first = world.log(0), last = world.log(1);
    for (const Step& step : steps) {
      arrive(first, step.id, at_first_too && step.waited_for);
      arrive(last, step.id, step.waited_for);
    }
    const Batches found = all_batches(first);
    CHECK(all_batches(last) == found);
    return found;
  };
  for (const bool at_first_too : {false, true}) {
    CHECK((batches({{5, false}, {6, false}, {7, false}, {8, false}}, at_first_too) == Batches{{5, 6, 7}, {8}}));
    CHECK((batches({{5, true}, {6, false}, {7, false}, {8, true}}, at_first_too) == Batches{{5}, {6, 7, 8}}));
    CHECK((batches({{5, true}, {kMaxIds - 1, true}, {0, false}}, at_first_too) == Batches{{5}, {kMaxIds - 1}, {0}}));
  }
}

// Each member has its own opinion of what is waited for. More than two laps, so places are taken again while others are
// still read.
void test_agreement() {
  std::vector<TensorId> ids;
  for (TensorId id = 0; id < kMaxIds; id += 81) ids.push_back(id);
  const int rounds = 2 * static_cast<int>(kMaxIds / ids.size()) + 20;
  for (const int n : {2, 3}) {
    OneHost world(n);
    std::vector<Batches> seen(static_cast<size_t>(n));
    in_ranks(n, [&](int rank) {
      SharedOrderLog log = world.log(rank);
      seen[rank] = run_rounds(
          log, rank, ids, rounds, [&](TensorId id, std::mt19937& random) { arrive(log, id, random() % 2 == 0); },
          [](const std::vector<TensorId>&) {});
    });
    for (int r = 1; r < n; ++r) CHECK(seen[r] == seen[0]);
    CHECK(std::any_of(seen[0].begin(), seen[0].end(), [](const auto& batch) { return batch.size() > 1; }));
  }
}

// Arrivals are taken back and come again; none is lost, and none runs that was taken back.
void test_withdrawals() {
  constexpr uint32_t kIds = 9;
  constexpr int kRounds = 2'000;
  for (const int n : {2, 3}) {
    OneHost world(n);
    std::vector<Batches> seen(static_cast<size_t>(n));
    std::atomic<int> withdrawn{0};
    in_ranks(n, [&](int rank) {
      SharedOrderLog log = world.log(rank);
      std::mt19937 random(static_cast<unsigned>(rank));
      std::vector<bool> arrived(kIds, false);
      std::vector<int> done(kIds, 0);
      const auto submit = [&](TensorId id) {
        CHECK(!arrived[id]);
        arrived[id] = true;
        arrive(log, id, random() % 2 == 0);
        if (random() % 4 == 0) CHECK_OK(log.withdraw(id));
      };
      for (TensorId id = 0; id < kIds; ++id) submit(id);
      for (size_t total = 0; total < size_t{kIds} * kRounds;) {
        const LogEvent event = next_event(log);
        if (event.kind == LogEvent::withdrawn) ++withdrawn;
        if (event.kind == LogEvent::batch) {
          seen[rank].push_back(event.ids);
          total += event.ids.size();
        }
        for (const TensorId id : event.ids) {
          CHECK(arrived[id]);
          arrived[id] = false;
          if (event.kind == LogEvent::batch) ++done[id];
          if (done[id] < kRounds) submit(id);
        }
      }
    });
    for (int r = 1; r < n; ++r) CHECK(seen[r] == seen[0]);
    CHECK(withdrawn > 0);
  }
}

constexpr NamedTest kTests[] = {
    {"waited_for", test_waited_for},
    {"agreement", test_agreement},
    {"withdrawals", test_withdrawals},
};

}  // namespace

int main(int argc, char** argv) { return run_named(argc, argv, kTests); }
