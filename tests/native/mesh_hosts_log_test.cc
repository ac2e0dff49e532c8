// The order log where some ranks share memory: their leaders speak for them. Ranks submit, take back, leave and abort
// in random order, and agree all the same.
#include <algorithm>
#include <atomic>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "check.h"
#include "collectives/mesh/collectives.h"
#include "hosts_world.h"
#include "log_driver.h"
#include "named_tests.h"

using namespace horovod;
using namespace horovod::testing;

namespace {

const std::vector<std::vector<int>> kLayouts = {{0, 0, 1, 1}, {0, 0, 1}, {0, 1, 1}, {0, 1, 0, 2, 1, 2}, {0, 0, 0, 1}};

// Small operations whose data travels with the arrival or does not, of sizes that fill the rings; ids repeat, arrivals
// are taken back, also those that the host has passed on, and come again with other data.
void test_values() {
  for (const std::vector<int>& layout : kLayouts) {
    for (const int regretful : {0, 2}) {  // in how many of ten rounds an arrival is taken back
      constexpr uint32_t kIds = 9;
      constexpr int kRounds = 60;
      const int n = static_cast<int>(layout.size());
      HostsWorld world(layout);
      std::vector<std::atomic<int>> values(static_cast<size_t>(n) * kIds * kRounds);  // of each rank's last arrival
      std::atomic<int> completed{0}, withdrawn{0};
      in_ranks(n, [&](int rank) {
        std::mt19937 random(static_cast<unsigned>(rank * 10 + regretful));
        const std::unique_ptr<OrderLog> log = world.log(rank);
        struct Slot {
          Operation operation;
          std::vector<float> in, out;
          int round = -1;
        };
        std::vector<Slot> slots(kIds);
        const auto value = [&](int r, uint32_t id, int round) -> std::atomic<int>& {
          return values[(static_cast<size_t>(r) * kIds + id) * kRounds + static_cast<size_t>(round)];
        };
        const auto submit = [&](uint32_t id) {
          Slot& slot = slots[id];
          const int number = static_cast<int>(random() % 1000);
          value(rank, id, slot.round) = number;
          const int64_t count = id < 5 ? static_cast<int64_t>(id) : 4096;  // 16 KB
          slot.in.assign(static_cast<size_t>(count), static_cast<float>(number));
          slot.out.assign(static_cast<size_t>(count), -1.0f);
          OpSpec& spec = slot.operation.spec;
          spec.type = id == 1 || id == 6 ? OpType::broadcast : OpType::allreduce;
          spec.root = n - 1;
          spec.reduce_op = id == 2 ? ReduceOp::max : id == 7 ? ReduceOp::average : ReduceOp::sum;
          spec.prescale = id == 3 ? 2.0 : 1.0;
          spec.tensors = {{DType::float32, {count}}};
          slot.operation.spans = {
              {reinterpret_cast<std::byte*>(slot.in.data()), reinterpret_cast<std::byte*>(slot.out.data()), count}};
          CHECK_OK(random() % 4 == 0 && regretful > 0 ? log->arrive(id) : log->arrive_with(id, slot.operation));
        };
        const auto next = [&](uint32_t id) {
          ++slots[id].round;
          submit(id);
          if (static_cast<int>(random() % 10) < regretful) CHECK_OK(log->withdraw(id));
        };
        for (uint32_t id = 0; id < kIds; ++id) next(id);
        for (uint32_t done = 0; done < kIds * kRounds;) {
          const LogEvent event = next_event(*log);
          if (event.kind == LogEvent::withdrawn) {
            ++withdrawn;
            submit(event.ids[0]);
            continue;
          }
          for (const uint32_t id : event.ids) {
            Slot& slot = slots[id];
            Operation* batch[] = {&slot.operation};
            if (event.completed) {
              ++completed;
            } else {
              CHECK_OK(slot.operation.spec.type == OpType::broadcast ? mesh::broadcast(world[rank], batch)
                                                                     : mesh::allreduce(world[rank], batch));
            }
            float want = id == 2 ? -1.0f : 0.0f;
            for (int r = 0; r < n; ++r) {
              const auto x = static_cast<float>(value(r, id, slot.round));
              want = id == 2 ? std::max(want, x) : want + x;
            }
            if (slot.operation.spec.type == OpType::broadcast) {
              want = static_cast<float>(value(n - 1, id, slot.round));
            } else if (id == 3) {
              want *= 2;
            } else if (id == 7) {
              want /= static_cast<float>(n);
            }
            for (const float got : slot.out) CHECK(std::abs(got - want) <= std::abs(want) * 1e-6f);
            ++done;
            if (slot.round + 1 < kRounds) next(id);
          }
        }
      });
      CHECK(completed > 0 && (regretful > 0) == (withdrawn > 0));
    }
  }
}

// Arrivals without data run in the same batches in the same order on all ranks, though one of them reads seldom: what
// does not fit into the rings waits.
void test_order() {
  for (const std::vector<int>& layout : kLayouts) {
    constexpr uint32_t kIds = 4000;
    constexpr int kRounds = 3;
    const int n = static_cast<int>(layout.size());
    HostsWorld world(layout);
    std::vector<std::vector<std::vector<TensorId>>> seen(n);
    in_ranks(n, [&](int rank) {
      const std::unique_ptr<OrderLog> log = world.log(rank);
      std::mt19937 random(static_cast<unsigned>(rank));
      std::vector<TensorId> ids(kIds);
      for (uint32_t i = 0; i < kIds; ++i) ids[i] = i * 4;
      for (int round = 0; round < kRounds; ++round) {
        std::shuffle(ids.begin(), ids.end(), random);
        for (const TensorId id : ids) CHECK_OK(log->arrive(id));
        for (size_t got = 0; got < kIds;) {
          seen[rank].push_back(next_event(*log).ids);
          got += seen[rank].back().size();
        }
      }
    });
    for (int r = 1; r < n; ++r) CHECK(seen[r] == seen[0]);
  }
}

// Whoever leaves, all others hear it after everything that was agreed; what they take back then is answered.
void test_leave() {
  for (const std::vector<int>& layout : kLayouts) {
    const int n = static_cast<int>(layout.size());
    for (int leaver = 0; leaver < n; ++leaver) {
      HostsWorld world(layout);
      in_ranks(n, [&](int rank) {
        const std::unique_ptr<OrderLog> log = world.log(rank);
        for (const TensorId id : {1u, 2u, 3u}) CHECK_OK(log->arrive(id));
        for (size_t got = 0; got < 3;) got += next_event(*log).ids.size();
        if (rank == leaver) return world.leave(rank);
        CHECK_OK(log->arrive(4));
        Status status;
        while (status.ok()) {
          LogEvent event;
          CHECK_OK(log->poll(event));
          CHECK(event.kind == LogEvent::none);
          status = log->wait(now_us() + 60'000'000);
        }
        CHECK(status.code() == Code::left && ends_with(status, error_code::shut_down, label_of(leaver)));
      });
    }
  }
}

// A rank that is lost, or aborts, is named everywhere.
void test_abort() {
  for (const std::vector<int>& layout : kLayouts) {
    const int n = static_cast<int>(layout.size());
    for (int victim = 0; victim < n; ++victim) {
      HostsWorld world(layout);
      in_ranks(n, [&](int rank) {
        const std::unique_ptr<OrderLog> log = world.log(rank);
        CHECK_OK(log->arrive(1));
        if (rank == victim) (void)next_event(*log);  // others may hear of its end first
        const std::string cause = "out of memory on rank " + std::to_string(victim);
        const auto end = [&](const std::string& why) {
          if (world.regions[rank]) world.regions[rank]->announce_end(MemberState::aborted, why);
          world[rank].announce_end(ControlKind::abort, why);
        };
        if (rank == victim) return end(cause);
        Status status;
        while (status.ok()) {
          LogEvent event;
          status = log->poll(event);
          if (status.ok() && event.kind == LogEvent::batch && event.ids[0] == 1) status = log->arrive(2);
          if (status.ok()) status = log->wait(now_us() + 60'000'000);
        }
        CHECK(contains(status.message(), cause));
        end(status.message());
      });
    }
  }
}

// A withdrawal is answered once, by an answer or by a batch, whoever else wants his arrival back at the same time.
void test_withdraw() {
  for (const std::vector<int>& layout : kLayouts) {
    const int n = static_cast<int>(layout.size());
    constexpr uint32_t kRounds = 150;
    HostsWorld world(layout);
    std::atomic<int> answers{0};
    in_ranks(n, [&](int rank) {
      const std::unique_ptr<OrderLog> log = world.log(rank);
      for (uint32_t id = 0; id < kRounds; ++id) {
        CHECK_OK(log->arrive(id));
        const bool regrets = (id + static_cast<uint32_t>(rank)) % 3 != 0;
        if (regrets) CHECK_OK(log->withdraw(id));
        LogEvent event = next_event(*log);
        if (event.kind == LogEvent::withdrawn) {
          CHECK(regrets && event.ids == std::vector<TensorId>{id});
          ++answers;
          CHECK_OK(log->arrive(id));  // so that the others get their batch
          event = next_event(*log);
        }
        CHECK(event.kind == LogEvent::batch && event.ids == std::vector<TensorId>{id});
      }
      // Nobody goes before everybody has everything: who is asked must answer.
      CHECK_OK(log->arrive(kRounds));
      CHECK(next_event(*log).ids == std::vector<TensorId>{kRounds});
    });
    CHECK(answers > 0);
  }
}

// Somebody has left, and the leader does not say so in time: the member closes the log for itself and takes back what
// it has arrived at. What the leader says of that later is no news.
void test_late_answers() {
  HostsWorld world({0, 0, 1});
  const std::unique_ptr<OrderLog> leader = world.log(0), member = world.log(1);
  constexpr TensorId kId = 5;
  CHECK_OK(member->arrive(kId));
  CHECK_OK(member->withdraw(kId));  // the leader does not look, and so does not answer
  world.leave(2);
  LogEvent event;
  Status status;
  for (int64_t end = now_us() + 60'000'000; status.ok() && now_us() < end;) {
    CHECK_OK(member->poll(event));
    CHECK(event.kind == LogEvent::none);
    status = member->wait(100'000);
  }
  CHECK(status.code() == Code::left, "%s", status.message().c_str());
  CHECK_OK(member->withdraw(kId));
  CHECK_OK(member->poll(event));
  CHECK(event.kind == LogEvent::withdrawn && event.ids == std::vector<TensorId>{kId});

  for (status = {}; status.ok(); status = leader->wait(10'000)) CHECK_OK(leader->poll(event));
  CHECK(status.code() == Code::left, "%s", status.message().c_str());
  CHECK_OK(member->poll(event));
  CHECK(event.kind == LogEvent::none);
}

const NamedTest kTests[] = {
    {"values", test_values}, {"order", test_order},       {"leave", test_leave},
    {"abort", test_abort},   {"withdraw", test_withdraw}, {"late_answers", test_late_answers},
};

}  // namespace

int main(int argc, char** argv) { return run_named(argc, argv, kTests); }
