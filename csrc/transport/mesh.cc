// How a mesh over sockets begins and ends, and how it treats a silent, lost or departed peer.
#include "transport/mesh.h"

#include <cerrno>
#include <cstring>
#include <utility>

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/clock.h"
#include "transport/socket_mesh.h"

namespace horovod {

using wire::Connection;
using wire::Progress;
using wire::Socket;

namespace {

constexpr size_t kMaxSentence = 4096;

}  // namespace

// -- life -------------------------------------------------------------------------------------------------------------

Status SocketMesh::open(std::vector<MeshPeer> peers, std::vector<std::vector<Socket>> sockets) {
  if (rank_ < 0 || rank_ >= static_cast<int>(peers.size()) || peers.size() > UINT16_MAX) {
    return {Code::invalid_argument, error_code::internal,
            "A mesh of " + std::to_string(peers.size()) + " members has no rank " + std::to_string(rank_) + "."};
  }
  wake_fd_ = Socket(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (wake_fd_.fd() < 0) {
    return {Code::internal, error_code::too_many_open_files,
            std::string("This process can't open an eventfd: ") + std::strerror(errno) +
                ". Raise its limit of open files (ulimit -n)."};
  }
  const crypto::Library* library = nullptr;
  if (config_.wire != WireMode::plain) {
    Status status;
    library = crypto::library(config_.crypto_file, status);
    if (!library) return status;
  }
  const std::string own_label = peers[static_cast<size_t>(rank_)].label;
  peers_.resize(peers.size());
  for (size_t r = 0; r < peers.size(); ++r) {
    SocketPeer& peer = peers_[r];
    peer.label = std::move(peers[r].label);
    if (static_cast<int>(r) == rank_) continue;
    if (!peers[r].partner) continue;
    if (sockets[r].empty()) {
      return {Code::invalid_argument, error_code::internal, "There is no connection to " + peer.label + "."};
    }
    if (library && peers[r].keys.size() != sockets[r].size()) {
      return {Code::invalid_argument, error_code::internal,
              "There are no keys for the connections to " + peer.label + "."};
    }
    for (Socket& socket : sockets[r]) {
      if (!wire::prepare_stream(socket.fd(), config_.unreachable_timeout_ms)) {
        return {Code::invalid_argument, error_code::internal,
                "A connection to " + peer.label + " is no usable stream socket: " + std::strerror(errno) + "."};
      }
      Connection::Identity identity{
          epoch_,   static_cast<uint16_t>(rank_), static_cast<uint16_t>(r), peer.connections.empty(), peer.label,
          own_label};
      std::unique_ptr<wire::SealedStream> sealed;
      if (library) {
        const wire::Keys& keys = peers[r].keys[peer.connections.size()];
        sealed = std::make_unique<wire::SealedStream>(*library, keys, config_.wire == WireMode::encrypted,
                                                      config_.wire_records_per_key);
      }
      peer.connections.push_back(
          std::make_unique<Connection>(std::move(socket), std::move(identity), std::move(sealed)));
    }
  }
  for (SocketPeer& peer : peers_) {
    for (const auto& connection : peer.connections) {
      lines_.push_back({&peer, connection.get()});
      polled_.push_back({connection->fd(), 0, 0});
    }
  }
  polled_.push_back({wake_fd_.fd(), POLLIN, 0});
  return {};
}

void SocketMesh::listen_to(const std::vector<int>& peers) {
  likely_.clear();
  if (peers.size() > kMostLikely) return;
  for (const int peer : peers) likely_.push_back(peers_[peer].connections[0].get());
}

SocketMesh::~SocketMesh() {
  for (Line& line : lines_) line.connection->discard_input();
}

Status SocketMesh::alive() const {
  if (abort_.raised()) return abort_.cause();
  return failed_;
}

// The first failure is final, and the memory of all transfers is free again.
Status SocketMesh::fail(Status status) {
  if (!failed_.ok()) return failed_;
  failed_ = std::move(status);
  for (Line& line : lines_) line.connection->drop_transfers();
  return failed_;
}

Status SocketMesh::departed(const SocketPeer& peer) { return {Code::left, peer.sentence}; }

Status SocketMesh::no_partner(const SocketPeer& peer) {
  return {Code::internal, error_code::internal,
          "This rank has no connection to " + peer.label +
              ", with which an algorithm wants to exchange something; please report this."};
}

// A connection of `peer` is gone and the peer has not said why. Before it is blamed, look for an abort frame that has
// arrived, from this peer or from another: that is the root cause, and the end of the connection only follows from it.
Status SocketMesh::lose(SocketPeer& peer) {
  for (Line& line : lines_) line.connection->drop_transfers();
  for (SocketPeer& other : peers_) {
    if (other.connections.empty() || other.left || other.aborted) continue;
    Connection& connection = *other.connections[0];
    const size_t before = inbox_.size();
    for (int i = 0; i < 16; ++i) {  // reads up to some 64 MB, as a peer may be sending much
      const Progress progress = connection.read(inbox_);
      if (!progress.moved || !progress.status.ok()) break;
    }
    note_control(before);
  }
  if (!failed_.ok()) return failed_;  // an abort frame was among them
  if (peer.left) return fail(departed(peer));
  abort_.note_lost(peer.label, false);
  if (peer.error == ETIMEDOUT || peer.error == EHOSTUNREACH || peer.error == ENETUNREACH) return unreachable(peer);
  const std::string how = peer.error == 0 ? "the other side closed it" : std::strerror(peer.error);
  return fail({Code::aborted, error_code::peer_lost,
               capitalized(peer.label) + " was lost: its connection ended (" + how + ")."});
}

Status SocketMesh::unreachable(const SocketPeer& peer) {
  return fail({Code::aborted, error_code::peer_lost,
               capitalized(peer.label) + " was lost: nothing has come from its host for " +
                   std::to_string(config_.unreachable_timeout_ms / 1000) +
                   " s (HOROVOD_UNREACHABLE_TIMEOUT_SECONDS), not even a sign that it lives. That host, this one's "
                   "link or the network between them is down; from here it can't be told which, nor whether the "
                   "others go on."});
}

Status SocketMesh::timed_out() const {
  std::string waiting;
  uint64_t expected = 0;
  uint64_t owed = 0;
  int count = 0;
  for (const SocketPeer& peer : peers_) {
    bool late = false;
    for (const auto& connection : peer.connections) {
      late = late || connection->expects() || connection->owes();
      expected += connection->expected_bytes();
      owed += connection->owes() ? 1 : 0;
    }
    if (!late || ++count > 4) continue;
    waiting += (waiting.empty() ? "" : ", ") + peer.label;
  }
  if (count > 4) waiting += " and " + std::to_string(count - 4) + " more";
  return {Code::timeout, error_code::no_progress,
          capitalized(waiting) + (count == 1 ? " has" : " have") + " made no progress for " +
              std::to_string(config_.progress_timeout_ms) + " ms in an operation that every rank had " + "started (" +
              std::to_string(expected) + " bytes not received" +
              (owed > 0 ? ", and it does not take what this rank sends" : "") + ")."};
}

// -- the end ----------------------------------------------------------------------------------------------------------

void SocketMesh::announce_end(ControlKind kind, std::string_view sentence) {
  const std::string text = shortened(std::string(sentence), kMaxSentence);
  for (SocketPeer& peer : peers_) {
    if (peer.connections.empty() || peer.left || peer.aborted) continue;
    (void)peer.connections[0]->send_control(kind, {}, text);
    if (stays_open(peer)) continue;
    for (const auto& connection : peer.connections) connection->end_output();
  }
}

void SocketMesh::linger(int64_t limit_us) {
  if (Status status = alive(); !status.ok()) (void)fail(std::move(status));
  const int64_t deadline = now_us() + limit_us;
  for (;;) {
    std::vector<pollfd> full;
    for (Line& line : lines_) {
      if (line.connection->send_waiting()) {
        if (!stays_open(*line.peer)) line.connection->end_output();
      } else {
        full.push_back({line.connection->fd(), POLLOUT, 0});
      }
    }
    const int64_t left_us = deadline - now_us();
    if (full.empty() || left_us <= 0) return;
    (void)poll(full.data(), full.size(), static_cast<int>((left_us + 999) / 1000));
  }
}

std::vector<KeptSocket> SocketMesh::hand_over(bool keep) {
  std::vector<KeptSocket> kept;
  for (size_t rank = 0; rank < peers_.size(); ++rank) {
    SocketPeer& peer = peers_[rank];
    if (!stays_open(peer)) continue;
    Connection& connection = *peer.connections[0];
    if (keep) {
      Socket socket = connection.hand_over(!peer.left && !peer.aborted);
      if (socket.fd() >= 0) {
        kept.push_back({static_cast<int>(rank), std::move(socket)});
        continue;
      }
    }
    connection.end_output();
  }
  return kept;
}

std::unique_ptr<Mesh> Mesh::create(int rank, uint64_t epoch, std::vector<MeshPeer> peers, const Config& config,
                                   AbortSignal& abort, Status& status) {
  std::vector<std::vector<Socket>> sockets(peers.size());  // made first, so that they are closed whatever happens
  for (size_t r = 0; r < peers.size(); ++r) {
    for (const int fd : peers[r].fds) sockets[r].emplace_back(fd);
  }
  auto mesh = std::make_unique<SocketMesh>(rank, epoch, config, abort);
  status = mesh->open(std::move(peers), std::move(sockets));
  if (!status.ok()) return nullptr;
  return mesh;
}

}  // namespace horovod
