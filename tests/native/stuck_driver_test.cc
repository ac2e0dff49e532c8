// An engine whose driver does not come back from an operation is closed all the same, and kept.
#include <semaphore.h>

#include <algorithm>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/interrupt.h"
#include "check.h"
#include "engine/engine.h"
#include "named_tests.h"
#include "stuck_thread.h"

using namespace horovod;
using namespace horovod::testing;

namespace {

sem_t g_inside, g_go_on;

// The driver is in the middle of an operation, holds no lock, and looks at nothing.
bool stay_here() {
  CHECK(::sem_post(&g_inside) == 0);
  CHECK(::sem_wait(&g_go_on) == 0);
  return false;
}

struct Pair {
  explicit Pair(int64_t close_timeout_ms) {
    Config config;
    config.close_timeout_ms = close_timeout_ms;
    Status status;
    std::vector<std::shared_ptr<Segment>> segments;
    for (int rank = 0; rank < 2; ++rank) {
      segments.push_back(Segment::create(Engine::segment_bytes(config), true, status));
      CHECK_OK(status);
    }
    for (int rank = 0; rank < 2; ++rank) {
      WorldSpec world;
      world.rank = rank;
      world.labels = {"rank 0 on host here", "rank 1 on host here"};
      world.segment = segments[static_cast<size_t>(rank)];
      world.segment_addresses = {segments[0]->address(), segments[1]->address()};
      engines.push_back(Engine::create(std::move(world), config, status));
      CHECK_OK(status);
    }
    // Until the engines' own threads wait for work; one that only begins would find some, and drive.
    const std::vector<pid_t> threads = threads_named("hvd-progress");
    CHECK(threads.size() == 2);
    while (!std::all_of(threads.begin(), threads.end(), is_asleep)) std::this_thread::yield();
  }
  // Every rank has started it, and rank 1 does not drive.
  std::shared_ptr<Submission> start(const std::string& name, int64_t count) {
    std::shared_ptr<Submission> mine;
    for (int rank = 0; rank < 2; ++rank) {
      tensors.emplace_back(static_cast<size_t>(count), 1.0f);
      const auto submission = std::make_shared<Submission>();
      submission->spec.type = OpType::allreduce;
      submission->spec.name = name;
      submission->spec.tensors = {{DType::float32, {count}}};
      auto* const data = reinterpret_cast<std::byte*>(tensors.back().data());
      submission->spans = {{data, data, count}};
      CHECK_OK(engines[static_cast<size_t>(rank)]->start(submission, Start::by_waiter));
      if (rank == 0) mine = submission;
    }
    for (const auto& engine : engines) engine->communicator(0)->apply_plan(name, 1);
    return mine;
  }

  std::vector<std::unique_ptr<Engine>> engines;
  std::vector<std::vector<float>> tensors;
};

void a_driver_that_does_not_come_back() {
  CHECK(::sem_init(&g_inside, 0, 0) == 0 && ::sem_init(&g_go_on, 0, 0) == 0);
  Pair pair(50);
  const std::shared_ptr<Submission> submission = pair.start("allreduce.x", 1 << 20);
  std::thread driver([&] {
    t_interrupt_hook = &stay_here;
    while (!pair.engines[0]->wait(*submission, 100'000)) {
    }
  });
  while (::sem_wait(&g_inside) != 0) {
  }
  const Status late = pair.engines[0]->close("");
  CHECK(late.code() == Code::timeout, "%s", late.message().c_str());
  CHECK(ends_with(late, error_code::stuck_thread, "rank 0 on host here", "allreduce.x", "50 ms"));
  CHECK(pair.engines[0]->stuck());
  CHECK(pair.engines[0]->close("").message() == late.message());
  CHECK(submission->state.load() == Operation::done && submission->status.code() == Code::aborted);
  CHECK(pair.engines[0]->pending(0) == 0);
  static Engine* const kept = pair.engines[0].get();  // for a sanitizer that looks for leaks
  Engine::dispose(std::move(pair.engines[0]));
  CHECK(::sem_post(&g_go_on) == 0);
  driver.join();  // it finds everything that it uses
  CHECK(kept->stuck());
  CHECK_OK(pair.engines[1]->close(""));
  CHECK(!pair.engines[1]->stuck());
}

constexpr NamedTest kTests[] = {
    {"a_driver_that_does_not_come_back", a_driver_that_does_not_come_back},
};

}  // namespace

int main(int argc, char** argv) { return run_named(argc, argv, kTests); }
