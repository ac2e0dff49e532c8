// The order log over the TCP data plane: ranks submit, take back and leave in random order, and agree all the same.
#include <algorithm>
#include <atomic>
#include <random>
#include <string>
#include <vector>

#include "base/clock.h"
#include "check.h"
#include "collectives/mesh/collectives.h"
#include "collectives/mesh/eager_records.h"
#include "collectives/partners.h"
#include "collectives/sparse/collectives.h"
#include "engine/mesh_order_log.h"
#include "log_driver.h"
#include "mesh_job.h"
#include "mesh_world.h"
#include "named_tests.h"

using namespace horovod;
using namespace horovod::testing;

namespace {

// A world whose members are connected to all others, or to their partners only.
struct LogWorld {
  LogWorld(int n, bool is_sparse, Wire wire = Wire::pair, int connections = 1)
      : hosts(hosts_of_mesh(n, {})), sparse(is_sparse), world(n, wire, connections, {}, is_sparse ? &hosts : nullptr) {}

  Mesh& operator[](int rank) { return world[rank]; }
  std::unique_ptr<MeshOrderLog> log(int rank) {
    return MeshOrderLog::make(world[rank], kThree, world.aborts[rank], sparse ? &hosts : nullptr);
  }
  Status run(int rank, Batch batch) {
    const OpType type = batch[0]->spec.type;
    if (!sparse)
      return type == OpType::broadcast ? mesh::broadcast(world[rank], batch) : mesh::allreduce(world[rank], batch);
    Hierarchy hierarchy{&world[rank], nullptr, hosts, 0};
    return type == OpType::broadcast ? sparse::broadcast(hierarchy, batch) : sparse::allreduce(hierarchy, batch);
  }

  const Hosts hosts;
  const bool sparse;
  World world;
};

struct Members {
  int n;
  bool sparse;
};

// Every rank runs an allreduce for every batch: all ranks see the same batches in the same order, each id once a round.
void test_order_log() {
  std::vector<TensorId> ids;
  for (TensorId id = 0; id < 40; ++id) ids.push_back(id * 400);
  for (const auto& [n, sparse] :
       {Members{1, false}, {2, false}, {3, false}, {5, false}, {2, true}, {3, true}, {11, true}}) {
    LogWorld world(n, sparse, Wire::tcp, n == 3 ? 2 : 1);
    std::vector<Batches> seen(static_cast<size_t>(n));
    in_ranks(n, [&](int rank) {
      const auto owner = world.log(rank);
      MeshOrderLog& log = *owner;
      seen[rank] = run_rounds(
          log, rank, ids, 5, [&](TensorId id, std::mt19937&) { CHECK_OK(log.arrive(id)); },
          [&](const std::vector<TensorId>& batch) {
            Job job(rank, OpType::allreduce, DType::int32, {{{static_cast<int64_t>(batch[0])}}}, true, true);
            CHECK_OK(world.run(rank, job.batch));
          });
    });
    for (int r = 1; r < n; ++r) CHECK(seen[r] == seen[0]);
  }
}

// Small operations whose bytes travel with their arrival; whether they do is each rank's own choice, and does not show
// in the results. Ids repeat, arrivals are taken back and come again with other bytes.
void test_eager() {
  for (const auto& members : {Members{2, false}, {3, false}, {5, false}, {3, true}, {7, true}, {8, true}}) {
    const int n = members.n;
    for (const int regretful : {0, 1, 2}) {  // in how many of ten rounds an arrival is taken back
      constexpr uint32_t kIds = 7;
      constexpr int kRounds = 150;
      LogWorld world(n, members.sparse, Wire::tcp, regretful == 1 ? 2 : 1);
      std::vector<std::atomic<int>> values(static_cast<size_t>(n) * kIds * kRounds);  // of each rank's last arrival
      std::atomic<int> completed{0}, withdrawn{0};
      in_ranks(n, [&](int rank) {
        std::mt19937 random(static_cast<unsigned>(rank * 10 + regretful));
        const auto owner = world.log(rank);
        MeshOrderLog& log = *owner;
        struct Slot {
          Operation operation;
          float in[9], out[9];
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
          for (int i = 0; i < 9; ++i) slot.in[i] = static_cast<float>(number + i), slot.out[i] = -1;
          OpSpec& spec = slot.operation.spec;
          spec.type = id == 0 ? OpType::broadcast : OpType::allreduce;
          spec.root = n - 1;
          spec.reduce_op = id == 1 ? ReduceOp::max : ReduceOp::sum;
          spec.prescale = id == 2 ? 2.0 : 1.0;
          spec.postscale = id == 3 ? 0.5 : 1.0;
          spec.tensors = {{DType::float32, {4}}, {DType::float32, {5}}};
          slot.operation.spans.clear();
          for (const int first : {0, 4}) {
            float* in = slot.in + first;
            float* out = id % 2 == 0 ? in : slot.out + first;  // in place or not
            slot.operation.spans.push_back(
                {reinterpret_cast<std::byte*>(in), reinterpret_cast<std::byte*>(out), first == 0 ? 4 : 5});
          }
          CHECK_OK(random() % 4 == 0 && regretful > 0 ? log.arrive(id) : log.arrive_with(id, slot.operation));
        };
        const auto next = [&](uint32_t id) {
          ++slots[id].round;
          submit(id);
          if (static_cast<int>(random() % 10) < regretful) CHECK_OK(log.withdraw(id));
        };
        for (uint32_t id = 0; id < kIds; ++id) next(id);
        for (uint32_t done = 0; done < kIds * kRounds;) {
          const LogEvent event = next_event(log);
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
              CHECK_OK(world.run(rank, batch));
            }
            for (int i = 0; i < 9; ++i) {
              float want = 0;
              for (int r = 0; r < n; ++r) {
                const float x = static_cast<float>(value(r, id, slot.round) + i);
                want = id == 1 ? std::max(want, x) : want + x;
              }
              if (id == 0) want = static_cast<float>(value(n - 1, id, slot.round) + i);
              if (id == 2) want *= 2;
              if (id == 3) want /= 2;
              CHECK((id % 2 == 0 ? slot.in : slot.out)[i] == want);
            }
            ++done;
            if (slot.round + 1 < kRounds) next(id);
          }
        }
      });
      CHECK(completed > 0 && (regretful > 0 ? withdrawn > 0 : completed == n * static_cast<int>(kIds) * kRounds));
    }
  }
}

// Arrivals that are taken back while others arrive: every rank gets exactly one answer, and answers fit together.
void test_withdraw() {
  constexpr int n = 3;
  constexpr uint32_t kRounds = 200;
  World world(n);
  std::vector<std::vector<LogEvent::Kind>> answers(n);
  std::vector<int> batches(n);
  in_ranks(n, [&](int rank) {
    const auto owner = MeshOrderLog::make(world[rank], kThree, world.aborts[rank]);
    MeshOrderLog& log = *owner;
    for (uint32_t id = 0; id < kRounds; ++id) {
      CHECK_OK(log.arrive(id));
      const bool regrets = static_cast<int>(id % n) == rank;
      if (regrets) CHECK_OK(log.withdraw(id));
      LogEvent event = next_event(log);
      if (event.kind == LogEvent::withdrawn) {
        CHECK(regrets && event.ids == std::vector<TensorId>{id});
        answers[rank].push_back(event.kind);
        CHECK_OK(log.arrive(id));  // so that the others get their batch
        event = next_event(log);
      }
      CHECK(event.kind == LogEvent::batch && event.ids == std::vector<TensorId>{id});
      ++batches[rank];
    }
    if (rank == 0) return;
    LogEvent event;
    CHECK_OK(log.poll(event));
    CHECK(event.kind == LogEvent::none);
  });
  for (int r = 0; r < n; ++r) CHECK(batches[r] == kRounds);
  CHECK(answers[1].size() + answers[2].size() > 0);
}

// One of two offers its next small data while the other has not reported yet what became of the last, and wants it
// back: it gets it back, though the other takes in both and the withdrawal with one look.
void test_withdraw_of_the_next_offer() {
  World world(2);
  const auto first = MeshOrderLog::make(world[0], kThree, world.aborts[0]);
  const auto second = MeshOrderLog::make(world[1], kThree, world.aborts[1]);
  MeshOrderLog &sequencer = *first, &member = *second;
  Job mine(0, OpType::allreduce, DType::float32, {{{5}}}, true, true);
  Job theirs(1, OpType::allreduce, DType::float32, {{{5}}}, true, true);
  LogEvent event;
  CHECK_OK(member.arrive_with(9, theirs.operations[0]));
  CHECK_OK(member.poll(event));
  CHECK(event.kind == LogEvent::none);
  CHECK_OK(sequencer.arrive_with(9, mine.operations[0]));
  event = next_event(sequencer);
  CHECK(event.completed && event.ids == std::vector<TensorId>{9});
  CHECK_OK(sequencer.arrive_with(9, mine.operations[0]));
  CHECK_OK(sequencer.withdraw(9));
  CHECK_OK(sequencer.poll(event));
  CHECK(event.kind == LogEvent::none);
  event = next_event(member);
  CHECK(event.completed && event.ids == std::vector<TensorId>{9});
  CHECK_OK(sequencer.wait(now_us() + 60'000'000));
  CHECK_OK(sequencer.poll(event));
  CHECK(event.kind == LogEvent::withdrawn && event.ids == std::vector<TensorId>{9});
}

void test_order_log_leave() {
  struct Leaving {
    Members members;
    int leaver;
  };
  // In the sparse worlds: the sequencer, one with members below it, one without, and one beyond the power of two.
  for (const auto& [members, leaver] :
       {Leaving{{3, false}, 0}, {{3, false}, 2}, {{11, true}, 0}, {{11, true}, 4}, {{11, true}, 7}, {{11, true}, 10}}) {
    const int n = members.n;
    LogWorld world(n, members.sparse, Wire::tcp);
    in_ranks(n, [&](int rank) {
      const auto owner = world.log(rank);
      MeshOrderLog& log = *owner;
      for (const TensorId id : {1u, 2u, 3u}) CHECK_OK(log.arrive(id));
      for (size_t got = 0; got < 3;) got += next_event(log).ids.size();  // all that was agreed
      if (rank == leaver) {
        world[rank].announce_end(ControlKind::leave, "");
        world.world.meshes[static_cast<size_t>(rank)].reset();
        return;
      }
      CHECK_OK(log.arrive(4));
      for (;;) {
        LogEvent event;
        Status status = log.poll(event);
        CHECK_OK(status);
        CHECK(event.kind == LogEvent::none);
        status = log.wait(now_us() + 60'000'000);
        if (status.ok()) continue;
        CHECK(status.code() == Code::left && ends_with(status, error_code::shut_down, label_of(leaver)));
        break;
      }
      if (leaver == 0) return;
      CHECK_OK(log.withdraw(4));  // still answered, if only locally
      LogEvent event;
      CHECK_OK(log.poll(event));
      CHECK(event.kind == LogEvent::withdrawn && event.ids == std::vector<TensorId>{4});
    });
  }
}

// In a tree: some have nothing to do, and so do not listen. The others hear all the same that a member has left, though
// they have no connection to it.
void test_leave_beside_a_member_that_does_not_listen() {
  struct Leaving {
    int leaver;
    std::vector<int> listeners;
  };
  // The leaver's parent is busy elsewhere, and partners of the leaver tell the sequencer; or the sequencer itself is,
  // and whoever gives up tells those below.
  for (const auto& [leaver, listeners] : {Leaving{6, {0, 1, 2}}, {1, {4, 6}}}) {
    LogWorld world(11, true, Wire::tcp);
    world[leaver].announce_end(ControlKind::leave, "");
    in_ranks(static_cast<int>(listeners.size()), [&](int index) {
      const auto owner = world.log(listeners[static_cast<size_t>(index)]);
      MeshOrderLog& log = *owner;
      CHECK_OK(log.arrive(4));
      Status status;
      for (const int64_t end_us = now_us() + 20'000'000; status.ok() && now_us() < end_us;) {
        LogEvent event;
        status = log.poll(event);
        if (status.ok()) status = log.wait(end_us);
      }
      CHECK(status.code() == Code::left && ends_with(status, error_code::shut_down, label_of(leaver)));
    });
  }
}

// Nothing but the failure that ends the log comes of it.
Status failure_of(OrderLog& log) {
  for (;;) {
    LogEvent event;
    HVD_TRY(log.poll(event));
    CHECK(event.kind == LogEvent::none);
    HVD_TRY(log.wait(now_us() + 1'000'000));
  }
}

void test_order_log_failures() {
  {  // a lost and an aborting peer
    World world(3);
    std::vector<Status> results(3);
    in_ranks(3, [&](int rank) {
      if (rank == 2) {
        world[2].announce_end(ControlKind::abort, "out of memory on rank 2");
        world.meshes[2].reset();
        return;
      }
      const auto owner = MeshOrderLog::make(world[rank], kThree, world.aborts[rank]);
      MeshOrderLog& log = *owner;
      CHECK_OK(log.arrive(9));
      LogEvent event;
      do {
        results[rank] = log.poll(event);
        if (results[rank].ok()) results[rank] = log.wait(now_us() + 60'000'000);
      } while (results[rank].ok());
    });
    CHECK(contains(results[0].message(), "out of memory on rank 2"));
    CHECK(contains(results[1].message(), "out of memory on rank 2"));
  }
  {  // frames that make no sense
    for (const bool at_sequencer : {true, false}) {
      for (const uint32_t id : {3u, kMaxIds}) {
        World world(2);
        const int target = at_sequencer ? 0 : 1;
        const auto owner = MeshOrderLog::make(world[target], kThree, world.aborts[target]);
        MeshOrderLog& log = *owner;
        const auto kind = at_sequencer == (id != 3u) ? ControlKind::ready : ControlKind::batch;  // the wrong one for 3
        CHECK_OK(world[1 - target].send_control(target, kind, {&id, 1}));
        const Status status = failure_of(log);
        CHECK(ends_with(status, error_code::unexpected_data));
      }
    }
  }
  // What a member has not arrived at, or an answer to its arrival that comes twice.
  for (const ControlKind kind : {ControlKind::batch, ControlKind::withdrawn}) {
    for (const std::vector<TensorId>& ids : {std::vector<TensorId>{8}, {9, 9}}) {
      World world(3);
      const auto owner = MeshOrderLog::make(world[1], kThree, world.aborts[1]);
      MeshOrderLog& log = *owner;
      CHECK_OK(log.arrive(9));
      CHECK_OK(world[0].send_control(1, kind, ids));
      const Status status = failure_of(log);
      CHECK(ends_with(status, error_code::unexpected_data, "id " + std::to_string(ids.back())));
    }
  }
  // Small data that is cut off, of no id, of no arrival, or of another length than here.
  const std::string bytes(16, 'x');
  for (const int fault : {0, 1, 2, 3}) {
    World world(2);
    std::string text;
    mesh::append_record(text, fault == 1 ? kMaxIds : fault == 2 ? 8 : 9, bytes);
    if (fault == 0) text.pop_back();
    const auto owner = MeshOrderLog::make(world[0], kThree, world.aborts[0]);
    MeshOrderLog& log = *owner;
    Job job(0, OpType::allreduce, DType::float32, {{{5}}}, true, true);
    CHECK_OK(log.arrive_with(9, job.operations[0]));
    const uint32_t id = 9;
    CHECK_OK(world[1].send_control(0, ControlKind::ready, {&id, 1}, text));
    const Status status = failure_of(log);
    CHECK(ends_with(status, error_code::unexpected_data));
  }
  // In a tree: a stamp that is cut off, of no member, of one that is not reached this way, a kind that goes nowhere,
  // and a batch that comes past the parent.
  struct Bad {
    int from, to;
    ControlKind kind;
    std::string text;
  };
  const auto stamp = [](uint32_t member) {
    return std::string(reinterpret_cast<const char*>(&member), sizeof(member));
  };
  for (const Bad& bad : {Bad{1, 0, ControlKind::ready, "abc"},
                         {1, 0, ControlKind::ready, stamp(5)},
                         {1, 0, ControlKind::ready, stamp(3)},
                         {3, 2, ControlKind::withdraw, stamp(1)},
                         {0, 2, ControlKind::withdrawn, stamp(1)},
                         {0, 2, ControlKind::withdrawn, stamp(0)},
                         {3, 2, ControlKind::batch, ""},
                         {0, 3, ControlKind::batch, ""},
                         {3, 2, ControlKind::offer, stamp(3)},
                         {3, 2, ControlKind::withdrawn, stamp(2)}}) {
    LogWorld tree(5, true);
    const auto owner = tree.log(bad.to);
    MeshOrderLog& log = *owner;
    const uint32_t id = 9;
    CHECK_OK(log.arrive(id));
    CHECK_OK(tree[bad.from].send_control(bad.to, bad.kind, {&id, 1}, bad.text));
    const Status status = failure_of(log);
    CHECK(ends_with(status, error_code::unexpected_data));
  }
  World world(2);
  const auto owner = MeshOrderLog::make(world[0], kThree, world.aborts[0]);
  MeshOrderLog& log = *owner;
  CHECK(log.arrive(kMaxIds).code() == Code::invalid_argument);
  CHECK_OK(log.arrive(1));
  CHECK(log.arrive(1).code() == Code::internal);
}

const NamedTest kTests[] = {
    {"order_log", test_order_log},
    {"withdraw", test_withdraw},
    {"withdraw_of_the_next_offer", test_withdraw_of_the_next_offer},
    {"eager", test_eager},
    {"order_log_leave", test_order_log_leave},
    {"leave_beside_a_member_that_does_not_listen", test_leave_beside_a_member_that_does_not_listen},
    {"order_log_failures", test_order_log_failures},
};

}  // namespace

int main(int argc, char** argv) { return run_named(argc, argv, kTests); }
