// Whole engines with tensors on GPUs (which stand-ins play), several threads for each rank: what the sanitizers should
// see. Worlds end in order, by an abort in the middle of everything, or with work on the devices that can't go on.
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "collectives/partners.h"
#include "engine/engine.h"
#include "gpu_world.h"
#include "named_tests.h"

using namespace horovod;
using namespace horovod::testing;

namespace {

constexpr int kThreads = 2;
constexpr size_t kElements = 1000;
constexpr size_t kManyElements = 20'000;  // of several chunks

// sparse: through the host, each rank connected to its partners only.
enum class Way { nccl, host, adasum, sparse };

// Ranks of one process, each with its GPU; with sockets on two hosts, which only Adasum looks at. Names end in their
// id, so that nobody has to agree on ids.
class GpuWorld {
 public:
  GpuWorld(int size, bool sockets, int streams, Way way = Way::nccl) {
    Config config;
    config.cuda_file = kCudaFile;
    config.nccl_file = kNcclFile;
    config.nvrtc_file = kNvrtcFile;
    config.nccl_streams = streams;
    config.host_operations = way == Way::host || way == Way::sparse ? ~0u : 0;
    if (way == Way::sparse) config.full_mesh_members = 1;
    config.staging_bytes = 16u << 10;
    std::vector<WorldSpec> specs(size);
    std::vector<std::string> labels, addresses;
    Status status;
    for (int rank = 0; rank < size; ++rank) labels.push_back("rank " + std::to_string(rank) + " on host here");
    for (int rank = 0; rank < size; ++rank) {
      specs[rank].rank = rank;
      specs[rank].epoch = 1;
      specs[rank].labels = labels;
      for (int other = 0; sockets && other < size; ++other) specs[rank].placement.push_back(other % 2);
      for (const int other : partners_of(size, rank, {}, specs[rank].placement, config)) {
        if (!sockets || other < rank) continue;
        int pair[2];
        CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
        specs[rank].sockets[other].push_back(pair[0]);
        specs[other].sockets[rank].push_back(pair[1]);
      }
      if (sockets) continue;
      specs[rank].segment = Segment::create(Engine::segment_bytes(config), true, status);
      CHECK_OK(status);
      addresses.push_back(specs[rank].segment->address());
    }
    for (WorldSpec& spec : specs) {
      spec.segment_addresses = addresses;
      engines.push_back(Engine::create(std::move(spec), config, status));
      CHECK_OK(status);
    }
    for (int rank = 0; rank < size; ++rank) planners_.emplace_back([this, rank] { plan(*engines[rank]); });
  }
  ~GpuWorld() {
    each([&](int rank) { CHECK_OK(engines[rank]->close("")); });
    for (std::thread& planner : planners_) planner.join();
  }
  int size() const { return static_cast<int>(engines.size()); }
  template <typename Body>
  void each(Body&& body) {
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < size(); ++rank) ranks.emplace_back([&, rank] { body(rank); });
    for (std::thread& rank : ranks) rank.join();
  }

  std::vector<std::unique_ptr<Engine>> engines;

 private:
  static void plan(Engine& engine) {
    std::vector<OutboxItem> items;
    while (engine.outbox().take(1000, items)) {
      for (const OutboxItem& item : items) {
        if (item.kind != OutboxItem::announce) continue;
        const auto id = static_cast<TensorId>(std::stoi(item.spec.name.substr(item.spec.name.rfind('.') + 1)));
        engine.communicator(0)->apply_plan(item.spec.name, id);
      }
    }
  }
  std::vector<std::thread> planners_;
};

// One thread's tensor, which is reduced in place again and again on a stream of the thread's own; that of every other
// thread in parts of uneven size, which are packed.
struct Worker {
  Worker(int rank, int number, size_t elements, ReduceOp op)
      : gpu(rank),
        op(op),
        name("allreduce." + std::to_string(number)),
        elements(static_cast<int64_t>(elements)),
        in_parts(number % 2 == 1) {
    data = gpu.make(std::vector<float>(elements, 1.0f));
  }
  ~Worker() {
    if (!last || !last->on_device || !last->on_device->finished) return;
    bool passed = false;
    CHECK(eventually([&] { return !last->on_device->finished->passed(passed).ok() || passed; }));
  }
  uintptr_t stream() const { return reinterpret_cast<uintptr_t>(gpu.stream->handle()); }

  Status start(Engine& engine) {
    last = std::make_shared<Submission>();
    last->spec.type = OpType::allreduce;
    last->spec.name = name;
    last->spec.device = DeviceKind::gpu;
    last->spec.reduce_op = op;
    for (int64_t at = 0, part = in_parts ? 1 : elements; at < elements; at += part, part += 3) {
      const int64_t count = std::min(part, elements - at);
      std::byte* const address = data.data.get() + static_cast<size_t>(at) * sizeof(float);
      last->spec.tensors.push_back({DType::float32, {count}});
      last->spans.push_back({address, address, count});
    }
    last->on_device = std::make_unique<OnDevice>();
    last->on_device->ordinal = gpu.device->ordinal();
    last->on_device->stream = stream();
    return engine.start(last, Start::gathered);
  }
  Status finish(Engine& engine) {
    while (!engine.wait(*last, 100'000)) continue;
    return engine.collect(last, stream(), [] { return KeepAlive(); });
  }

  Gpu gpu;
  const ReduceOp op;
  const std::string name;
  const int64_t elements;
  const bool in_parts;
  OutputBuffer data;
  std::shared_ptr<Submission> last;
};

// Steps until something fails; the tensor must outlive the engine's use of it, as a framework's reference sees to.
int run_steps(Engine& engine, Worker& worker, int steps) {
  for (int step = 0; step < steps; ++step) {
    Status status = worker.start(engine);
    if (status.ok()) status = worker.finish(engine);
    if (!status.ok()) return step;
  }
  return steps;
}

using Workers = std::vector<std::vector<std::unique_ptr<Worker>>>;

Workers make_workers(const GpuWorld& world, size_t elements = kElements, Way way = Way::nccl) {
  const ReduceOp op = way == Way::adasum ? ReduceOp::adasum : ReduceOp::sum;
  Workers workers(world.size());
  for (int rank = 0; rank < world.size(); ++rank) {
    for (int i = 0; i < kThreads; ++i) workers[rank].push_back(std::make_unique<Worker>(rank, i, elements, op));
  }
  return workers;
}

template <typename Body>
void in_threads(GpuWorld& world, Body&& body) {
  world.each([&](int rank) {
    std::thread other([&] { body(rank, 1); });
    body(rank, 0);
    other.join();
  });
}

void steps_of_several_threads(bool sockets, int streams, Way way = Way::nccl) {
  const size_t elements = way == Way::nccl ? kElements : kManyElements;
  const int size = way == Way::sparse ? 6 : 3;  // of six, not all are partners
  GpuWorld world(size, sockets, streams, way);
  const Workers workers = make_workers(world, elements, way);
  // Equal vectors are their Adasum.
  const auto expected = way == Way::adasum ? 1.0f : static_cast<float>(std::pow(size, 6));
  in_threads(world, [&](int rank, int i) { CHECK(run_steps(*world.engines[rank], *workers[rank][i], 6) == 6); });
  for (const auto& rank : workers) {
    for (const auto& worker : rank) {
      worker->gpu.synchronize();
      CHECK(values_of<float>(worker->data) == std::vector<float>(elements, expected));
    }
  }
}

void in_order() {
  steps_of_several_threads(false, 1);
  steps_of_several_threads(true, 1);
  steps_of_several_threads(false, 3);
}

void through_the_host() {
  steps_of_several_threads(false, 1, Way::host);
  steps_of_several_threads(true, 1, Way::host);
  steps_of_several_threads(true, 1, Way::sparse);
}

void with_adasum() {
  steps_of_several_threads(false, 1, Way::adasum);
  steps_of_several_threads(true, 2, Way::adasum);
}

void abort_in_the_middle(Way way) {
  for (int round = 0; round < 12; ++round) {
    GpuWorld world(way == Way::adasum ? 3 : 2, round % 2 == 1, 1 + round % 3, way);
    const Workers workers = make_workers(world, way == Way::nccl ? kElements : kManyElements, way);
    std::atomic<int> steps{0};
    std::thread aborting([&] {
      CHECK(eventually([&] { return steps.load() >= round; }));
      world.engines[round % 2]->abort("rank " + std::to_string(round % 2) + " gave up.");
    });
    in_threads(world, [&](int rank, int i) {
      while (run_steps(*world.engines[rank], *workers[rank][i], 1) == 1) steps.fetch_add(1);
      steps.fetch_add(100);
    });
    aborting.join();
    for (const auto& rank : workers) {
      for (const auto& worker : rank) worker->gpu.synchronize();  // nothing hangs there
    }
    for (const auto& engine : world.engines) CHECK(contains(engine->ended().message(), "gave up"));
  }
}

void by_an_abort_in_the_middle() { abort_in_the_middle(Way::nccl); }
void by_an_abort_while_they_stage() { abort_in_the_middle(Way::host); }
void by_an_abort_in_adasum() { abort_in_the_middle(Way::adasum); }

void with_work_that_can_not_go_on() {
  for (const bool sockets : {false, true}) {
    GpuWorld world(2, sockets, 1);
    const Workers workers = make_workers(world);
    in_threads(world, [&](int rank, int i) { CHECK(run_steps(*world.engines[rank], *workers[rank][i], 1) == 1); });
    void* held = workers[1][0]->gpu.hold();
    world.each([&](int rank) { CHECK(run_steps(*world.engines[rank], *workers[rank][0], 1) == 1); });
    world.engines[0]->abort("rank 0 gave up.");
    workers[0][0]->gpu.synchronize();
    Gpu::release(held);
    workers[1][0]->gpu.synchronize();
  }
}

void with_work_that_goes_on() {
  auto world = std::make_unique<GpuWorld>(2, false, 1);
  const Workers workers = make_workers(*world, 200'000);
  void* held = workers[1][0]->gpu.hold();
  world->each([&](int rank) { CHECK(run_steps(*world->engines[rank], *workers[rank][0], 1) == 1); });
  std::thread closing([&] { world.reset(); });
  Gpu::release(held);
  closing.join();
  for (const auto& rank : workers) {
    rank[0]->gpu.synchronize();
    CHECK(values_of<float>(rank[0]->data)[0] == 2.0f);
  }
}

constexpr NamedTest kTests[] = {
    {"worlds end in order", in_order},
    {"worlds that go through the host end in order", through_the_host},
    {"worlds with Adasum between hosts end in order", with_adasum},
    {"worlds end by an abort in the middle", by_an_abort_in_the_middle},
    {"worlds end by an abort while they go through the host", by_an_abort_while_they_stage},
    {"worlds end by an abort in an Adasum between hosts", by_an_abort_in_adasum},
    {"worlds end with work that can not go on", with_work_that_can_not_go_on},
    {"worlds end with work that goes on", with_work_that_goes_on},
};

}  // namespace

int main(int argc, char** argv) {
  const int result = run_named(argc, argv, kTests);
  for (const char* what : {"streams", "events", "contexts", "blocks", "pinned", "modules", "pools"}) {
    CHECK(eventually([&] { return count("cuda", what) == 0; }), "%s are left", what);
  }
  CHECK(count("nccl", "communicators") == 0 && count("nccl", "operations") == 0);
  return result;
}
