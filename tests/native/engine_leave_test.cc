// A rank that leaves in order, over sockets: what it owes to peers that are slow to read still reaches them.
#include <sys/socket.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "check.h"
#include "collectives/mesh/eager_records.h"
#include "engine/engine.h"
#include "named_tests.h"

using namespace horovod;
using namespace horovod::testing;

namespace {

constexpr uint64_t kEpoch = 7;
constexpr int kSize = 3;
constexpr TensorId kIds = 80;
constexpr int64_t kElements = 4096;  // 1.3 MB of results for each peer, far more than a socket holds

// Rank 0 is an engine; of the others the test has the connections in hand.
struct World {
  World() {
    Status status;
    Config config;
    WorldSpec spec;
    spec.epoch = kEpoch;
    for (int rank = 0; rank < kSize; ++rank) spec.labels.push_back("rank " + std::to_string(rank) + " on host here");
    for (int peer = 1; peer < kSize; ++peer) {
      int fds[2];
      CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, fds) == 0);
      spec.sockets[peer] = {fds[0]};
      std::vector<MeshPeer> known(kSize);
      for (int rank = 0; rank < kSize; ++rank) known[rank].label = spec.labels[static_cast<size_t>(rank)];
      for (int rank = 1; rank < kSize; ++rank) known[rank].partner = false;
      known[0].fds = {fds[1]};
      peers.push_back(Mesh::create(peer, kEpoch, std::move(known), config, abort, status));
      CHECK_OK(status);
    }
    engine = Engine::create(std::move(spec), config, status);
    CHECK_OK(status);
  }

  AbortSignal abort;
  std::vector<std::unique_ptr<Mesh>> peers;
  std::unique_ptr<Engine> engine;
};

void results_that_a_peer_has_not_read() {
  World world;
  std::vector<float> tensor(kElements, 1.0f);
  std::vector<std::shared_ptr<Submission>> started;
  for (TensorId id = 0; id < kIds; ++id) {
    const std::string name = "broadcast." + std::to_string(id);
    auto& submission = started.emplace_back(std::make_shared<Submission>());
    submission->spec.type = OpType::broadcast;
    submission->spec.name = name;
    submission->spec.tensors = {{DType::float32, {kElements}}};
    auto* const data = reinterpret_cast<std::byte*>(tensor.data());
    submission->spans = {{data, data, kElements}};
    CHECK_OK(world.engine->start(submission, Start::by_waiter));
    world.engine->communicator(0)->apply_plan(name, id);
    std::string nothing;  // is what those that are not the root contribute
    mesh::append_record(nothing, id, {});
    for (const auto& peer : world.peers) CHECK_OK(peer->send_control(0, ControlKind::ready, {&id, 1}, nothing));
  }
  for (const auto& submission : started) {
    while (!world.engine->wait(*submission, 100'000)) continue;
    CHECK_OK(submission->status);
  }
  std::thread leaving([&] {
    CHECK_OK(world.engine->close("it is through"));
    world.engine.reset();
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  for (const auto& peer : world.peers) {
    TensorId results = 0;
    for (bool left = false; !left;) {
      CHECK_OK(peer->wait(60'000'000));
      ControlFrame frame;
      for (bool found = true; found;) {
        CHECK_OK(peer->next_control(frame, found));
        if (found && frame.kind == ControlKind::batch) results += static_cast<TensorId>(frame.ids.size());
        if (found && frame.kind == ControlKind::leave) left = true;
      }
    }
    CHECK(results == kIds, "%u results have come", results);
  }
  leaving.join();
}

constexpr NamedTest kTests[] = {
    {"results_that_a_peer_has_not_read", results_that_a_peer_has_not_read},
};

}  // namespace

int main(int argc, char** argv) { return run_named(argc, argv, kTests); }
