// Fuzz target for everything that a rank parses from a mesh connection: frame headers, control frames, the order log's
// small data (of ranks and of hosts), row counts and data of every collective. The input is what one peer sends before
// its connection ends; a real Mesh with a real order log or collective reads it through socket pairs. Whatever comes,
// the call must end with a Status: no crash, no hang, no access outside of the memory (sanitizers see to that).
// How it is run is in fuzz.h.
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <thread>

#include "base/clock.h"
#include "check.h"
#include "collectives/hosts.h"
#include "collectives/mesh/collectives.h"
#include "collectives/mesh/eager.h"
#include "engine/mesh_order_log.h"
#include "fuzz.h"
#include "fuzz_work.h"
#include "transport/mesh.h"
#include "transport/mesh_frame.h"

using namespace horovod;
using namespace horovod::testing;

namespace {

constexpr uint64_t kEpoch = 7;
constexpr size_t kInputBytes = 3;         // of an input, in front of the stream: what Setup says
constexpr size_t kStreamBytes = 100'000;  // fits into a socket's buffer, so that nobody has to write meanwhile
constexpr uint32_t kIds = 6;              // which the order log's member has arrived at

// log_of_hosts, log_with_others: the log's members are hosts. The peer speaks for one of them, or has no say in the log
// (which takes a third rank, and the sequencer to be under test).
enum class Action : int {
  log,
  log_withdraw,
  log_of_hosts,
  log_with_others,
  exchange,
  allreduce,
  broadcast,
  allgather,
  alltoall,
  reducescatter
};
constexpr int kActions = 10;
constexpr bool is_log(Action action) { return action < Action::exchange; }

// What the first bytes of an input say about the rank under test.
struct Setup {
  int rank;         // 0 is the order log's sequencer
  int connections;  // to each peer
  int size;         // with 3, a silent peer is there too
  Action action;
  size_t early;   // bytes of the stream that come before the action begins
  size_t second;  // bytes, from the end, that go to the second connection

  static Setup of(const uint8_t* data, size_t stream) {
    Setup setup;
    setup.rank = data[0] & 1;
    setup.connections = (data[0] & 2) ? 2 : 1;
    setup.size = (data[0] & 4) ? 3 : 2;
    setup.action = static_cast<Action>((data[0] >> 3) % kActions);
    setup.second = setup.connections == 2 ? stream * data[2] / 256 : 0;
    setup.early = (stream - setup.second) * data[1] / 256;
    return setup;
  }
};

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

// One member's part: of the rank under test, and of its peer (the rank `hostile`) while a conversation is recorded.
Status run(Mesh& mesh, AbortSignal& abort, Action action, int hostile) {
  Work work;
  const auto one = [&](OpType type, int64_t elements, int root, auto collective) -> Status {
    Operation* batch[] = {work.add(type, elements, root)};
    return collective(mesh, Batch(batch));
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
    default:
      break;
  }
  const bool of_hosts = action == Action::log_of_hosts || action == Action::log_with_others;
  const Hosts hosts(hosts_of(action, mesh.size()));
  if (of_hosts && hosts.leader(hosts.host(mesh.rank())) != mesh.rank()) return {};  // not a member of the log
  const FuseRule two = [](const TensorId*, size_t count) { return std::min<size_t>(count, 2); };
  const auto owner = MeshOrderLog::make(mesh, two, abort, of_hosts ? &hosts : nullptr);
  MeshOrderLog& log = *owner;
  for (uint32_t id = 0; id < kIds; ++id) {  // two plain ones, the others bring their bytes
    if (id < 2) {
      HVD_TRY(log.arrive(id));
      continue;
    }
    Operation& operation = *work.add(OpType::allreduce, 3 * (id + 1));
    HVD_TRY(of_hosts ? arrive_for_host(log, hosts, mesh.rank(), id, operation) : log.arrive_with(id, operation));
  }
  if (action == Action::log_withdraw) HVD_TRY(log.withdraw(1));
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
  if (action == Action::log_of_hosts && mesh.rank() == hostile) HVD_TRY(log.depart("A rank of the host has left."));
  return {};
}

void feed(int fd, const uint8_t* data, size_t size) {
  CHECK(size == 0 || send(fd, data, size, MSG_NOSIGNAL | MSG_DONTWAIT) == static_cast<ssize_t>(size), "%s",
        std::strerror(errno));
}

void connect_pair(int fds[2]) {
  CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, fds) == 0, "%s", std::strerror(errno));
  const int bytes = 1 << 20;
  for (int i = 0; i < 2; ++i) (void)setsockopt(fds[i], SOL_SOCKET, SO_SNDBUF, &bytes, sizeof(bytes));
}

Status run_input(const uint8_t* data, size_t size, bool hang_up = true) {
  if (size < kInputBytes) return {};
  const uint8_t* stream = data + kInputBytes;
  size = std::min(size - kInputBytes, kStreamBytes);
  const Setup setup = Setup::of(data, size);
  const int hostile = 1 - setup.rank;
  std::vector<MeshPeer> peers(setup.size);
  std::vector<int> remote;  // the hostile peer's connections, then the silent one's
  for (int peer : {hostile, 2}) {
    for (int c = 0; c < setup.connections && peer < setup.size; ++c) {
      int fds[2];
      connect_pair(fds);
      peers[peer].fds.push_back(fds[0]);
      remote.push_back(fds[1]);
    }
  }
  for (int r = 0; r < setup.size; ++r) peers[r].label = label_of(r);
  AbortSignal abort;
  Status status;
  std::unique_ptr<Mesh> mesh = Mesh::create(setup.rank, kEpoch, std::move(peers), fuzz_config(), abort, status);
  CHECK(mesh, "%s", status.message().c_str());
  feed(remote[0], stream, setup.early);
  ControlFrame frame;
  bool found = false;
  if (setup.early % 2 == 1) status = mesh->next_control(frame, found);  // half a frame may have been read
  feed(remote[0], stream + setup.early, size - setup.early - setup.second);
  if (setup.second > 0) feed(remote[1], stream + size - setup.second, setup.second);
  for (int c = 0; c < setup.connections && hang_up; ++c) (void)shutdown(remote[c], SHUT_WR);
  status = run(*mesh, abort, setup.action, hostile);
  CHECK(status.ok() || !status.message().empty(), "a failure without a sentence");
  mesh->announce_end(ControlKind::leave, "");
  mesh.reset();
  for (const int fd : remote) close(fd);
  return status;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  (void)run_input(data, size);
  return 0;
}

#ifndef HOROVOD_LIBFUZZER

namespace {

// What `peer` (the other rank of two) says in a good run, as an input that begins with the matching setup.
std::string record(int rank, Action action) {
  int near[2], far[2];
  connect_pair(near);
  connect_pair(far);
  const auto member = [&](int me, int fd) {
    AbortSignal abort;
    Status status;
    std::vector<MeshPeer> peers(2);
    for (int r = 0; r < 2; ++r) peers[r].label = label_of(r);
    peers[1 - me].fds = {fd};
    Config patient = fuzz_config();
    patient.progress_timeout_ms = 20'000;
    auto mesh = Mesh::create(me, kEpoch, std::move(peers), patient, abort, status);
    // One that has no say in the log says nothing but why it leaves.
    if (action != Action::log_with_others) (void)run(*mesh, abort, action, 1 - rank);
    if (action == Action::log || action == Action::log_with_others)
      mesh->announce_end(ControlKind::leave, "The recording is over.");
    if (action == Action::log_withdraw) mesh->announce_end(ControlKind::abort, "The recording is over.");
  };
  std::thread tested(member, rank, near[0]), peer(member, 1 - rank, far[0]);
  std::string said(kInputBytes, '\0');
  said[0] = static_cast<char>(rank | static_cast<int>(action) << 3);
  if (action == Action::log_with_others) said[0] = static_cast<char>(said[0] | 4);
  pollfd ends[2] = {{near[1], POLLIN, 0}, {far[1], POLLIN, 0}};
  for (int open = 2; open > 0;) {  // relays both ways
    CHECK(poll(ends, 2, -1) > 0, "%s", std::strerror(errno));
    for (int i = 0; i < 2; ++i) {
      if (ends[i].fd < 0 || ends[i].revents == 0) continue;
      char buffer[65536];
      const ssize_t got = read(ends[i].fd, buffer, sizeof(buffer));
      const int sink = i == 0 ? far[1] : near[1];
      if (got <= 0) {
        (void)shutdown(sink, SHUT_WR);
        ends[i].fd = -1;
        --open;
        continue;
      }
      if (i == 1) said.append(buffer, static_cast<size_t>(got));
      (void)send(sink, buffer, static_cast<size_t>(got), MSG_NOSIGNAL);
    }
  }
  tested.join();
  peer.join();
  close(near[1]);
  close(far[1]);
  return said;
}

std::vector<std::string> record_all() {
  std::vector<std::string> all;
  for (int action = 0; action < kActions; ++action) {
    for (int rank = 0; rank < 2; ++rank) {
      all.push_back(record(rank, static_cast<Action>(action)));
    }
  }
  return all;
}

std::vector<std::string> frames_of(const std::string& stream) {
  std::vector<std::string> frames;
  for (size_t at = 0; at < stream.size();) {
    wire::FrameHeader header;
    size_t size = stream.size() - at;
    if (size >= sizeof(header)) {
      std::memcpy(&header, stream.data() + at, sizeof(header));
      size = std::min(size, sizeof(header) + static_cast<size_t>(header.length));
    }
    frames.push_back(stream.substr(at, size));
    at += size;
  }
  return frames;
}

std::string made_up_frame(std::mt19937& random, int sender) {
  wire::FrameHeader header;
  header.kind = static_cast<uint8_t>(random() % 12);  // with two that do not exist
  header.sender = static_cast<uint16_t>(sender);
  header.epoch = kEpoch;
  header.sequence = random() % 3;
  std::string payload(random() % 5 == 0 ? 1000 + random() % 8000 : random() % 64, '\0');
  for (char& byte : payload) byte = random() % 2 ? static_cast<char>(random()) : static_cast<char>(random() % 8);
  if (header.kind != 0 && payload.size() >= 4 && random() % 4 > 0) {  // few ids, then records that may make sense
    const uint32_t count = random() % std::max<size_t>(1, std::min<size_t>(payload.size() / 4, 6));
    std::memcpy(payload.data(), &count, sizeof(count));
    for (uint32_t i = 0; i < count; ++i) {
      const uint32_t id = random() % 8;
      std::memcpy(payload.data() + 4 + 4 * i, &id, sizeof(id));
    }
  }
  header.length = payload.size();
  std::string frame(reinterpret_cast<const char*>(&header), sizeof(header));
  return frame + payload;
}

std::string mutate(const std::vector<std::string>& seeds, std::mt19937& random) {
  const std::string& seed = seeds[random() % seeds.size()];
  std::string setup = seed.substr(0, kInputBytes);
  if (random() % 8 == 0) setup[0] = static_cast<char>(random());
  setup[1] = static_cast<char>(random());
  if (random() % 8 == 0) setup[0] = static_cast<char>(setup[0] | 2);
  if (random() % 8 == 0) setup[0] = static_cast<char>(setup[0] | 4);
  setup[2] = static_cast<char>(random());
  const int sender = 1 - (setup[0] & 1);
  std::vector<std::string> frames = frames_of(seed.substr(kInputBytes));
  // A head: the header's length, and the beginning of the payload.
  spoil(frames, random, {24, 40}, [&] { return made_up_frame(random, sender); });
  if (random() % 2 == 0) {  // control frames count, so that what was moved or made up is looked at
    uint64_t sequence = 0;
    for (std::string& frame : frames) {
      if (frame.size() < sizeof(wire::FrameHeader) || frame[4] == 0) continue;
      std::memcpy(frame.data() + 16, &sequence, sizeof(sequence));
      ++sequence;
    }
  }
  std::string input = setup;
  for (const std::string& frame : frames) input += frame;
  if (random() % 4 == 0) input.resize(kInputBytes + random() % (input.size() - kInputBytes + 1));
  return input;
}

}  // namespace

int main(int argc, char** argv) {
  const auto run_as_is = [](const std::string& input, bool hang_up) {
    return run_input(reinterpret_cast<const uint8_t*>(input.data()), input.size(), hang_up);
  };
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
