// The order log of members that share memory: ranks submit and take back in random order from several threads, for more
// than a lap of the ring, and agree all the same.
#include "engine/shared_order_log.h"

#include <algorithm>
#include <atomic>
#include <deque>
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

// An allgather, or an allreduce in place, of `count` floats that are `value`.
struct Small {
  Small(OpType type, size_t count, float value) : floats(count, value) {
    auto* const memory = reinterpret_cast<std::byte*>(floats.data());
    operation.spec.type = type;
    operation.spec.tensors = {{DType::float32, {static_cast<int64_t>(count)}}};
    operation.spans = {{memory, type == OpType::allreduce ? memory : nullptr, static_cast<int64_t>(count)}};
  }

  std::vector<float> floats;
  Operation operation;
};

// Small operations are over when their batch is reported, others are not, and no batch has both. Of an allgather whose
// rows one member could not send along both members know the row counts, and run the rest.
void test_completed() {
  constexpr size_t kMany = kEagerBytes / sizeof(float) + 1;
  struct Step {
    TensorId id;
    OpType type;
    size_t counts[2];
    bool completed;
  };
  const std::vector<Step> steps = {
      {3, OpType::allreduce, {5, 5}, true},      {kEagerIds, OpType::allreduce, {5, 5}, false},
      {4, OpType::allreduce, {5, 5}, true},      {5, OpType::allreduce, {kMany, kMany}, false},
      {6, OpType::allgather, {2, 3}, true},      {7, OpType::allgather, {2, kMany}, false},
      {8, OpType::allgather, {kMany, 0}, false}, {9, OpType::allgather, {0, 1}, true},
  };
  OneHost world(2);
  SharedOrderLog logs[] = {world.log(0), world.log(1)};
  std::deque<Small> operations[2];
  for (const Step& step : steps) {
    for (const int rank : {0, 1}) {
      Small& small = operations[rank].emplace_back(step.type, step.counts[rank], static_cast<float>(rank + 1));
      CHECK_OK(logs[rank].arrive_with(step.id, small.operation));
    }
  }
  const auto step_of = [&](TensorId id) {
    return static_cast<size_t>(
        std::find_if(steps.begin(), steps.end(), [id](const Step& step) { return step.id == id; }) - steps.begin());
  };
  Batches seen[2];
  for (const int rank : {0, 1}) {
    for (size_t reported = 0; reported < steps.size();) {
      const LogEvent event = next_event(logs[rank]);
      seen[rank].push_back(event.ids);
      reported += event.ids.size();
      for (const TensorId id : event.ids) {
        const Step& step = steps[step_of(id)];
        const Small& small = operations[rank][step_of(id)];
        CHECK(event.completed == step.completed);
        const bool gathers = step.type == OpType::allgather;
        CHECK(small.operation.told_rows.size() == (gathers && !step.completed ? 2 : 0));
        for (size_t from = 0; from < small.operation.told_rows.size(); ++from) {
          CHECK(small.operation.told_rows[from] == static_cast<int64_t>(step.counts[from]));
        }
        if (!gathers) CHECK(small.floats[0] == (step.completed ? 3.0F : static_cast<float>(rank + 1)));
        if (!gathers || !step.completed) continue;
        const auto* const result = reinterpret_cast<const float*>(small.operation.outputs[0].data.get());
        for (size_t i = 0; i < step.counts[0] + step.counts[1]; ++i) CHECK(result[i] == (i < step.counts[0] ? 1 : 2));
      }
    }
  }
  CHECK(seen[0] == seen[1]);
  CHECK((seen[0] == Batches{{3}, {kEagerIds}, {4}, {5}, {6}, {7, 8}, {9}}));
}

constexpr NamedTest kTests[] = {
    {"waited_for", test_waited_for},
    {"agreement", test_agreement},
    {"withdrawals", test_withdrawals},
    {"completed", test_completed},
};

}  // namespace

int main(int argc, char** argv) { return run_named(argc, argv, kTests); }
