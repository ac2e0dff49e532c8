// A world of ranks in one process: each rank's end of the data plane, connected by socket pairs or loopback TCP.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "collectives/partners.h"
#include "transport/mesh.h"

namespace horovod::testing {

enum class Wire { pair, tcp };

inline void connect_pair(Wire wire, int fds[2]) {
  if (wire == Wire::pair) {
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, fds) == 0);
    return;
  }
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  CHECK(bind(listener, reinterpret_cast<sockaddr*>(&address), length) == 0);
  CHECK(listen(listener, 1) == 0);
  CHECK(getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length) == 0);
  fds[0] = socket(AF_INET, SOCK_STREAM, 0);
  CHECK(connect(fds[0], reinterpret_cast<sockaddr*>(&address), length) == 0);
  fds[1] = accept(listener, nullptr, nullptr);
  CHECK(fds[1] >= 0);
  close(listener);
}

inline std::string label_of(int rank) {
  return "rank " + std::to_string(rank) + " (pid 4242) on host node-" + std::to_string(rank);
}

// As the handshake would derive them: the same two for both ends, and no two connections alike.
inline wire::Keys keys_of(int from, int to, int connection) {
  const auto key = [&](int sender, int receiver) {
    crypto::Key made{};
    made[0] = static_cast<std::byte>(sender);
    made[1] = static_cast<std::byte>(receiver);
    made[2] = static_cast<std::byte>(connection);
    return made;
  };
  return {key(from, to), key(to, from)};
}

// What each rank needs to make its mesh, where `hosts` is not null a sparse one.
inline std::vector<std::vector<MeshPeer>> connect_all(int n, Wire wire, int connections, const Hosts* hosts = nullptr) {
  std::vector<std::vector<MeshPeer>> peers(n);
  for (int r = 0; r < n; ++r) {
    peers[r].resize(n);
    for (int p = 0; p < n; ++p) peers[r][p].label = label_of(p);
    if (!hosts) continue;
    const std::vector<int> partners = partners_of(*hosts, r);
    for (int p = 0; p < n; ++p) {
      peers[r][p].partner = p == r || std::find(partners.begin(), partners.end(), p) != partners.end();
    }
  }
  for (int a = 0; a < n; ++a) {
    for (int b = a + 1; b < n; ++b) {
      if (!peers[a][b].partner) continue;
      for (int c = 0; c < connections; ++c) {
        int fds[2];
        connect_pair(wire, fds);
        peers[a][b].fds.push_back(fds[0]);
        peers[b][a].fds.push_back(fds[1]);
        peers[a][b].keys.push_back(keys_of(a, b, c));
        peers[b][a].keys.push_back(keys_of(b, a, c));
      }
    }
  }
  return peers;
}

struct World {
  // sparse: the hosts of a sparse mesh.
  World(int n, Wire wire = Wire::pair, int connections = 1, Config config = {}, const Hosts* sparse = nullptr)
      : aborts(n), peers(connect_all(n, wire, connections, sparse)) {
    if (sparse) config.full_mesh_members = 1;
    for (int r = 0; r < n; ++r) {
      Status status;
      meshes.push_back(Mesh::create(r, 7, peers[r], config, aborts[r], status));
      CHECK_OK(status);
    }
  }
  int size() const { return static_cast<int>(meshes.size()); }
  Mesh& operator[](int rank) { return *meshes[rank]; }

  std::vector<AbortSignal> aborts;
  std::vector<std::vector<MeshPeer>> peers;
  std::vector<std::unique_ptr<Mesh>> meshes;
};

inline void in_ranks(int n, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int r = 0; r < n; ++r) threads.emplace_back(body, r);
  for (std::thread& thread : threads) thread.join();
}

inline Status receive_from(Mesh& mesh, int peer, size_t bytes) {
  std::vector<uint8_t> in(bytes);
  const Transfer receive{peer, {{in.data(), bytes}}};
  return mesh.exchange({}, {&receive, 1});
}
inline Status send_to(Mesh& mesh, int peer, size_t bytes) {
  std::vector<uint8_t> out(bytes, 3);
  const Transfer send{peer, {{out.data(), bytes}}};
  return mesh.exchange({&send, 1}, {});
}

}  // namespace horovod::testing
