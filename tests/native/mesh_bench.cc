// Latency and bandwidth of the TCP data plane over loopback.
//
//   mesh_bench [LEAST [MOST]]   for sizes in that range, in bytes
//
// MESH_BENCH_SPIN_US says how long a rank spins before it sleeps, MESH_BENCH_WIRE what connections are: 0 plain, 1
// signed, 2 encrypted. MESH_BENCH_STAR=1: two ranks agree by way of the sequencer, as more do (docs/adr/0025).
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#include "check.h"
#include "collectives/mesh/collectives.h"
#include "engine/mesh_order_log.h"
#include "log_driver.h"
#include "mesh_world.h"

using namespace horovod;
using namespace horovod::testing;

namespace {

double cpu_s() {
  rusage used{};
  getrusage(RUSAGE_SELF, &used);
  return static_cast<double>(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
         static_cast<double>(used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6;
}
double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// One rank of the benchmark. Prints algorithm bandwidth; small sizes also with the order log.
void bench_rank(Mesh& mesh, AbortSignal& abort, size_t least, size_t most) {
  const int n = mesh.size();
  const bool star = std::getenv("MESH_BENCH_STAR") != nullptr;
  const auto owner =
      star ? std::make_unique<MeshOrderLog>(mesh, kThree, abort) : MeshOrderLog::make(mesh, kThree, abort);
  MeshOrderLog& log = *owner;
  const auto measure = [&](const char* what, size_t bytes, const std::function<void()>& run) {
    for (int i = 0; i < (bytes > (1u << 24) ? 1 : 5); ++i) run();
    std::vector<double> times;
    const int repeats = bytes <= 65536 ? 1000 : bytes <= (1u << 20) ? 200 : bytes <= (1u << 24) ? 25 : 4;
    const double cpu_before = cpu_s();
    for (int i = 0; i < repeats; ++i) {
      const double start = now_s();
      run();
      times.push_back(now_s() - start);
    }
    const double cpu = (cpu_s() - cpu_before) / repeats;
    std::sort(times.begin(), times.end());
    const double median = times[times.size() / 2];
    const double best = times[times.size() / 20];
    if (mesh.rank() != 0) return;
    std::printf("  %-14s %10zu B  median %10.1f us  best %10.1f us  cpu %9.1f us  %6.2f GB/s\n", what, bytes,
                median * 1e6, best * 1e6, cpu * 1e6, static_cast<double>(bytes) / median / 1e9);
    std::fflush(stdout);
  };
  for (const size_t bytes : {size_t{4}, size_t{1} << 10, size_t{1} << 12, size_t{1} << 14, size_t{1} << 17,
                             size_t{1} << 20, size_t{1} << 24, size_t{1} << 28}) {
    if (bytes < least || bytes > most) continue;
    std::vector<float> data(bytes / 4, 1.0f);
    Operation operation;
    operation.spec.type = OpType::allreduce;
    operation.spec.reduce_op = ReduceOp::max;
    operation.spec.tensors = {{DType::float32, {static_cast<int64_t>(bytes / 4)}}};
    auto* memory = reinterpret_cast<std::byte*>(data.data());
    operation.spans = {{memory, memory, static_cast<int64_t>(bytes / 4)}};
    Operation* batch[] = {&operation};
    if (bytes <= (16u << 10)) {
      measure("log+allreduce", bytes, [&] {
        CHECK_OK(log.arrive_with(1, operation));
        if (!next_event(log).completed) CHECK_OK(mesh::allreduce(mesh, batch));
      });
    }
    measure("allreduce", bytes, [&] { CHECK_OK(mesh::allreduce(mesh, batch)); });
    measure("broadcast", bytes, [&] { CHECK_OK(mesh::broadcast(mesh, batch)); });
    operation.spans[0].output = nullptr;
    operation.spec.tensors[0].shape[0] = std::max<int64_t>(1, operation.spec.tensors[0].shape[0] / n);
    measure("allgather", bytes, [&] { CHECK_OK(mesh::allgather(mesh, batch)); });
  }
  std::vector<Transfer> all;  // nobody leaves before all have finished
  uint8_t byte = 0;
  for (int p = 0; p < n; ++p) {
    if (p != mesh.rank()) all.push_back({p, {{&byte, 1}}});
  }
  CHECK_OK(mesh.exchange(all, all));
  mesh.announce_end(ControlKind::leave, "");
}

// Ranks are processes, as in real life.
void bench(size_t least, size_t most) {
  for (const int n : {2, 4}) {
    for (const int connections : {1, 2}) {
      std::printf("%d ranks, %d connection%s per pair\n", n, connections, connections > 1 ? "s" : "");
      std::fflush(stdout);
      auto peers = connect_all(n, Wire::tcp, connections);
      std::vector<pid_t> children;
      for (int rank = 0; rank < n; ++rank) {
        const pid_t child = fork();
        CHECK(child >= 0);
        if (child > 0) {
          children.push_back(child);
          continue;
        }
        for (int r = 0; r < n; ++r) {
          for (const MeshPeer& peer : peers[r]) {
            for (const int fd : peer.fds) {
              if (r != rank) close(fd);
            }
          }
        }
        AbortSignal abort;
        Status status;
        Config config;
        if (const char* spin = std::getenv("MESH_BENCH_SPIN_US")) config.spin_us = std::atol(spin);
        if (const char* wire = std::getenv("MESH_BENCH_WIRE")) config.wire = static_cast<WireMode>(std::atoi(wire));
        auto mesh = Mesh::create(rank, 7, peers[rank], config, abort, status);
        CHECK_OK(status);
        bench_rank(*mesh, abort, least, most);
        mesh.reset();
        _exit(0);
      }
      for (const auto& mine : peers) {
        for (const MeshPeer& peer : mine) {
          for (const int fd : peer.fds) close(fd);
        }
      }
      for (const pid_t child : children) {
        int result = 0;
        CHECK(waitpid(child, &result, 0) == child && result == 0);
      }
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  bench(argc > 1 ? std::strtoul(argv[1], nullptr, 10) : 0,
        argc > 2 ? std::strtoul(argv[2], nullptr, 10) : size_t{1} << 28);
}
