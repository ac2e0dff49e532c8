// Fuzz target for everything that a rank parses from a mesh connection: frame headers, control frames, the order log's
// small data (of ranks and of hosts), row counts and data of every collective. The input is what one peer sends before
// its connection ends, or what all peers do (mesh_inputs.h); a real Mesh with a real order log or collective reads it
// through socket pairs. Whatever comes, the call must end with a Status: no crash, no hang, no access outside of the
// memory (sanitizers see to that). How it is run is in fuzz.h.
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <barrier>
#include <cstring>
#include <random>
#include <string>
#include <string_view>
#include <thread>

#include "base/clock.h"
#include "check.h"
#include "collectives/hosts.h"
#include "collectives/mesh/collectives.h"
#include "collectives/mesh/eager.h"
#include "collectives/partners.h"
#include "collectives/sparse/collectives.h"
#include "engine/mesh_order_log.h"
#include "fuzz.h"
#include "fuzz_work.h"
#include "mesh_inputs.h"
#include "transport/mesh.h"

using namespace horovod;
using namespace horovod::testing;

namespace {

constexpr uint32_t kIds = 6;  // which the order log's member has arrived at

std::string label_of(int rank) { return "rank " + std::to_string(rank) + " on host fuzz"; }

// The hosts of a world of so many ranks.
std::vector<int> hosts_of(Action action, int size) {
  if (size == 2) return {0, 1};
  return action == Action::log_with_others ? std::vector<int>{0, 0, 1} : std::vector<int>{0, 1, 1};
}

// What the order log of hosts gets from a host whose members all have the same to contribute.
Status arrive_for_host(MeshOrderLog& log, const Hosts& hosts, int rank, TensorId id, Operation& operation) {
  std::string combined;
  const std::vector<std::string> same(hosts.members(hosts.host(rank)).size(), mesh::pack_eager(operation, rank));
  HVD_TRY(mesh::combine_host(operation, hosts, hosts.host(rank), same, combined));
  return log.arrive_combined(id, operation, std::move(combined));
}

Config config_of(Action action) {
  Config config = fuzz_config();
  if (is_sparse(action)) config.full_mesh_members = 1;
  return config;
}

// One member's part: of the rank under test, and of its peers (as a rule the rank `hostile`) while a conversation is
// recorded.
Status run(Mesh& mesh, AbortSignal& abort, Action action, int hostile) {
  Work work;
  const auto one = [&](OpType type, int64_t elements, int root, auto collective) -> Status {
    Operation* batch[] = {work.add(type, elements, root)};
    return collective(mesh, Batch(batch));
  };
  Hierarchy sparse{&mesh, nullptr, hosts_of_mesh(mesh.size(), {}), 0};
  const auto over_sparse = [&](OpType type, int64_t elements, auto collective) -> Status {
    Operation* batch[] = {work.add(type, elements)};
    return collective(sparse, Batch(batch));
  };
  switch (action) {
    case Action::exchange: {
      std::vector<uint8_t> bytes(5000);
      const bool sends = mesh.rank() == hostile;
      const Transfer moved{sends ? 1 - hostile : hostile, {{bytes.data(), 100}, {bytes.data() + 100, 4900}}};
      for (int again = 0; again < 2; ++again) {
        HVD_TRY(sends ? mesh.exchange({&moved, 1}, {}) : mesh.exchange({}, {&moved, 1}));
      }
      return {};
    }
    case Action::allreduce:
      HVD_TRY(one(OpType::allreduce, 30, 0, mesh::allreduce));
      return one(OpType::allreduce, 12'000, 0, mesh::allreduce);
    case Action::broadcast:
      return one(OpType::broadcast, 9'000, hostile, mesh::broadcast);
    case Action::allgather:
      return one(OpType::allgather, 600, 0, mesh::allgather);
    case Action::alltoall:
      return one(OpType::alltoall, 900, 0, mesh::alltoall);
    case Action::reducescatter:
      return one(OpType::reducescatter, 900, 0, mesh::reducescatter);
    case Action::sparse_allreduce:
      HVD_TRY(over_sparse(OpType::allreduce, 30, sparse::allreduce));
      return over_sparse(OpType::allreduce, 6'000, sparse::allreduce);
    case Action::sparse_allgather:  // of rows that are in the announcements, and of others
      HVD_TRY(over_sparse(OpType::allgather, 30, sparse::allgather));
      return over_sparse(OpType::allgather, 600, sparse::allgather);
    case Action::sparse_alltoall:
      HVD_TRY(over_sparse(OpType::alltoall, 36, sparse::alltoall));
      return over_sparse(OpType::alltoall, 3'600, sparse::alltoall);
    case Action::sparse_reducescatter:
      HVD_TRY(over_sparse(OpType::reducescatter, 900, sparse::reducescatter));
      return over_sparse(OpType::reducescatter, 3, sparse::reducescatter);  // of fewer rows than members
    default:
      break;
  }
  const bool of_hosts = action == Action::log_of_hosts || action == Action::log_with_others;
  const bool is_tree = action == Action::sparse_log;
  const bool is_last = mesh.rank() == mesh.size() - 1;
  const Hosts hosts = is_tree ? sparse.hosts : Hosts(hosts_of(action, mesh.size()));
  if (of_hosts && hosts.leader(hosts.host(mesh.rank())) != mesh.rank()) return {};  // not a member of the log
  const FuseRule two = [](const TensorId*, size_t count) { return std::min<size_t>(count, 2); };
  const auto owner = MeshOrderLog::make(mesh, two, abort, of_hosts || is_tree ? &hosts : nullptr);
  MeshOrderLog& log = *owner;
  for (uint32_t id = 0; id < kIds; ++id) {  // two plain ones, the others bring their bytes
    if (id < 2) {
      HVD_TRY(log.arrive(id));
      continue;
    }
    Operation& operation = *work.add(OpType::allreduce, 3 * (id + 1));
    HVD_TRY(of_hosts ? arrive_for_host(log, hosts, mesh.rank(), id, operation) : log.arrive_with(id, operation));
  }
  if (action == Action::log_withdraw || (is_tree && is_last)) HVD_TRY(log.withdraw(1));
  // Every agreed run is begun again, for a while.
  for (int again = 8, idle = 0; idle < 3;) {
    LogEvent event;
    HVD_TRY(log.poll(event));
    if (event.kind == LogEvent::none) {
      ++idle;
      HVD_TRY(log.wait(now_us() + 500));
      continue;
    }
    for (const TensorId id : event.ids) {
      if (id < kIds && --again > 0) HVD_TRY(log.arrive(id));
    }
  }
  // Says `closing`, of one that it speaks for.
  if (is_tree ? is_last : action == Action::log_of_hosts && mesh.rank() == hostile)
    HVD_TRY(log.depart("A rank of the host has left."));
  return {};
}

void feed(int fd, std::string_view bytes) {
  CHECK(bytes.empty() ||
            send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT) == static_cast<ssize_t>(bytes.size()),
        "%s", std::strerror(errno));
}

void connect_pair(int fds[2]) {
  CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, fds) == 0, "%s", std::strerror(errno));
  const int bytes = 1 << 20;
  for (int i = 0; i < 2; ++i) (void)setsockopt(fds[i], SOL_SOCKET, SO_SNDBUF, &bytes, sizeof(bytes));
}

Status run_input(std::string_view input, bool hang_up = true) {
  if (input.size() < kInputBytes) return {};
  const Setup setup = Setup::of(reinterpret_cast<const uint8_t*>(input.data()));
  const std::vector<std::string_view> parts = parts_of(setup, input.substr(kInputBytes));
  const auto second = [&](int peer) { return parts[static_cast<size_t>(peer)].size() * setup.second / 256; };
  const auto early = [&](int peer) {
    return (parts[static_cast<size_t>(peer)].size() - second(peer)) * setup.early / 256;
  };
  std::vector<MeshPeer> peers(setup.size);
  std::vector<std::vector<int>> remote(static_cast<size_t>(setup.size));  // by peer: its ends of the connections
  std::vector<int> speakers;
  for (int peer = 0; peer < setup.size; ++peer) {
    peers[peer].label = label_of(peer);
    if (peer == setup.rank) continue;
    if (is_sparse(setup.action) || peer == setup.hostile()) speakers.push_back(peer);
    for (int c = 0; c < setup.connections; ++c) {
      int fds[2];
      connect_pair(fds);
      peers[peer].fds.push_back(fds[0]);
      remote[peer].push_back(fds[1]);
    }
  }
  AbortSignal abort;
  Status status;
  std::unique_ptr<Mesh> mesh =
      Mesh::create(setup.rank, kEpoch, std::move(peers), config_of(setup.action), abort, status);
  CHECK(mesh, "%s", status.message().c_str());
  for (const int peer : speakers) feed(remote[peer][0], parts[peer].substr(0, early(peer)));
  ControlFrame frame;
  bool found = false;
  if (early(speakers[0]) % 2 == 1) status = mesh->next_control(frame, found);  // half a frame may have been read
  for (const int peer : speakers) {
    const std::string_view rest = parts[peer].substr(early(peer));
    feed(remote[peer][0], rest.substr(0, rest.size() - second(peer)));
    if (second(peer) > 0) feed(remote[peer][1], rest.substr(rest.size() - second(peer)));
    const bool ends = hang_up && (!is_sparse(setup.action) || peer == setup.ends);
    for (int c = 0; c < setup.connections && ends; ++c) (void)shutdown(remote[peer][c], SHUT_WR);
  }
  status = run(*mesh, abort, setup.action, setup.hostile());
  CHECK(status.ok() || !status.message().empty(), "a failure without a sentence");
  mesh->announce_end(ControlKind::leave, "");
  mesh.reset();
  for (const std::vector<int>& fds : remote) {
    for (const int fd : fds) close(fd);
  }
  return status;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  (void)run_input({reinterpret_cast<const char*>(data), size});
  return 0;
}

#ifndef HOROVOD_LIBFUZZER

namespace {

// Moves what comes at one of `ends` to the end that belongs to it, until all have ended. said[i] gets what came at
// ends[i].
void relay(const std::vector<int>& ends, const std::vector<int>& sinks, std::vector<std::string>& said) {
  std::vector<pollfd> polled;
  for (const int fd : ends) polled.push_back({fd, POLLIN, 0});
  for (size_t open = ends.size(); open > 0;) {
    CHECK(poll(polled.data(), polled.size(), -1) > 0, "%s", std::strerror(errno));
    for (size_t i = 0; i < ends.size(); ++i) {
      if (polled[i].fd < 0 || polled[i].revents == 0) continue;
      char buffer[65536];
      const ssize_t got = read(ends[i], buffer, sizeof(buffer));
      if (got <= 0) {
        (void)shutdown(sinks[i], SHUT_WR);
        polled[i].fd = -1;
        --open;
        continue;
      }
      said[i].append(buffer, static_cast<size_t>(got));
      (void)send(sinks[i], buffer, static_cast<size_t>(got), MSG_NOSIGNAL);
    }
  }
}

// What the peers say to the rank under test in a good run, as an input that begins with this setup. A rank that would
// be silent does not take part.
std::string record(uint8_t first) {
  const uint8_t bytes[kInputBytes] = {first, 0, 0};
  const Setup setup = Setup::of(bytes);
  const int size = is_sparse(setup.action) ? setup.size : 2;
  std::vector<std::vector<int>> fds(static_cast<size_t>(size), std::vector<int>(static_cast<size_t>(size), -1));
  std::vector<int> near, far;  // beside the rank under test and beside a peer
  for (int a = 0; a < size; ++a) {
    for (int b = a + 1; b < size; ++b) {
      int pair[2];
      connect_pair(pair);
      fds[a][b] = pair[0];
      fds[b][a] = pair[1];
      if (a != setup.rank && b != setup.rank) continue;
      const int peer = a == setup.rank ? b : a;
      near.push_back(std::exchange(fds[peer][setup.rank], -1));
      connect_pair(pair);
      fds[peer][setup.rank] = pair[0];
      far.push_back(pair[1]);
    }
  }
  std::barrier done(size);
  const auto member = [&](int me) {
    AbortSignal abort;
    Status status;
    std::vector<MeshPeer> peers(static_cast<size_t>(size));
    for (int r = 0; r < size; ++r) {
      peers[r].label = label_of(r);
      if (r != me) peers[r].fds = {fds[me][r]};
    }
    Config patient = config_of(setup.action);
    patient.progress_timeout_ms = 20'000;
    auto mesh = Mesh::create(me, kEpoch, std::move(peers), patient, abort, status);
    // One that has no say in the log says nothing but why it leaves.
    if (setup.action != Action::log_with_others) (void)run(*mesh, abort, setup.action, setup.hostile());
    if (setup.action == Action::log || setup.action == Action::log_with_others || setup.action == Action::sparse_log)
      mesh->announce_end(ControlKind::leave, "The recording is over.");
    if (setup.action == Action::log_withdraw) mesh->announce_end(ControlKind::abort, "The recording is over.");
    // Who has nothing more to do waits for the others, to whom its end would be a loss.
    if (is_sparse(setup.action)) done.arrive_and_wait();
  };
  std::vector<std::thread> members;
  for (int rank = 0; rank < size; ++rank) members.emplace_back(member, rank);
  std::vector<int> ends(near), sinks(far);
  ends.insert(ends.end(), far.begin(), far.end());
  sinks.insert(sinks.end(), near.begin(), near.end());
  std::vector<std::string> said(ends.size());
  relay(ends, sinks, said);
  for (std::thread& thread : members) thread.join();
  for (const int fd : ends) close(fd);
  std::string input(reinterpret_cast<const char*>(bytes), sizeof(bytes));
  for (size_t i = near.size(); i < said.size(); ++i) {
    if (is_sparse(setup.action)) {
      append_part(input, said[i]);
    } else {
      input += said[i];
    }
  }
  return input;
}

std::vector<std::string> record_all() {
  std::vector<std::string> all;
  for (int action = 0; action < kActions; ++action) {
    const auto kind = static_cast<Action>(action);
    for (int rank = 0; rank < 2; ++rank) {
      const int first = action << 3 | rank;
      all.push_back(record(static_cast<uint8_t>(kind == Action::log_with_others ? first | 4 : first)));
      if (is_sparse(kind)) all.push_back(record(static_cast<uint8_t>(first | 4)));
    }
  }
  return all;
}

}  // namespace

int main(int argc, char** argv) {
  const auto run_as_is = [](const std::string& input, bool hang_up) { return run_input(input, hang_up); };
  FuzzTarget target{"fuzz_mesh", record_all(), nullptr, nullptr, nullptr};
  target.check_seed = [&](const std::string& seed) {
    const Status status = run_as_is(seed, false);
    const bool has_end = is_log(static_cast<Action>((static_cast<uint8_t>(seed[0]) >> 3) % kActions));
    CHECK(status.ok() || has_end, "%s", status.message().c_str());
  };
  target.mutate = [&target](std::mt19937& random) { return mutate(target.seeds, random); };
  target.run = [&](const std::string& input) { (void)run_as_is(input, true); };
  return run_target(argc, argv, target);
}

#endif  // HOROVOD_LIBFUZZER
