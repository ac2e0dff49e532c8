// The driver's side of the mesh: which connection may move, when to sleep, and what a silent, lost or departed peer
// means.
#include "transport/mesh.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <deque>
#include <utility>

#include <poll.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/clock.h"
#include "transport/mesh_connection.h"

namespace horovod {
namespace {

using wire::Connection;
using wire::Progress;
using wire::Socket;
using wire::Stripe;

constexpr int kSliceMs = 50;  // no sleep is longer, so that an abort is seen even if nobody wakes us
// A peer announces its end on connection 0. When another connection ends first, the frame may still be on its way.
constexpr int64_t kGraceUs = 200'000;
// Waiting is likely to be short only while the ranks are talking.
constexpr int64_t kLivelyUs = 2'000;
constexpr size_t kMaxSentence = 4096;
constexpr uint64_t kSpinBytes = 64u << 10;  // a larger transfer is worth a sleep

uint64_t length_of(const Transfer& transfer) {
  uint64_t bytes = 0;
  for (const iovec& piece : transfer.pieces) bytes += piece.iov_len;
  return bytes;
}

// Calls take(stripe, index) for each stripe of a transfer of `bytes` bytes.
template <typename Take>
void cut(const Transfer& transfer, uint64_t bytes, int stripes, Take&& take) {
  size_t piece = 0;
  size_t inside = 0;
  for (int i = 0; i < stripes; ++i) {
    Stripe stripe;
    stripe.left = wire::stripe_begin(bytes, stripes, i + 1) - wire::stripe_begin(bytes, stripes, i);
    for (uint64_t need = stripe.left; need > 0;) {
      const iovec& from = transfer.pieces[piece];
      const size_t size = static_cast<size_t>(std::min<uint64_t>(from.iov_len - inside, need));
      if (size > 0) stripe.pieces.push_back({static_cast<std::byte*>(from.iov_base) + inside, size});
      need -= size;
      inside += size;
      if (inside == from.iov_len) {
        ++piece;
        inside = 0;
      }
    }
    take(std::move(stripe), i);
  }
}

struct Peer {
  std::string label;
  std::vector<std::unique_ptr<Connection>> connections;  // empty for this rank itself
  uint64_t sent = 0;                                     // transfers started
  uint64_t received = 0;
  std::atomic<bool> left{false};     // a leave frame came; written by the driver, read by announce_end()
  std::atomic<bool> aborted{false};  // an abort frame came
  std::string sentence;              // what it said
  int64_t broken_at_us = 0;          // a connection ended although the peer has said nothing; 0: none did
  int error = 0;                     // how
};

class SocketMesh final : public Mesh {
 public:
  SocketMesh(int rank, uint64_t epoch, const Config& config, AbortSignal& abort)
      : rank_(rank), epoch_(epoch), config_(config), abort_(abort) {}
  ~SocketMesh() override;

  Status open(std::vector<MeshPeer> peers, std::vector<std::vector<Socket>> sockets);

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(peers_.size()); }
  Status exchange(std::span<const Transfer> sends, std::span<const Transfer> receives) override;
  Status start(std::span<const Transfer> sends, std::span<const Transfer> receives, Flight& flight) override;
  Status finish(Flight& flight) override;
  Status progress(bool& busy) override;
  void while_waiting(std::function<void()> act) override { while_waiting_ = std::move(act); }
  Status send_control(int peer, ControlKind kind, std::span<const uint32_t> ids, std::string_view text) override;
  Status next_control(ControlFrame& frame, bool& found) override;
  Status wait(int64_t timeout_us) override;
  void wake() override;
  void set_patient(bool patient) override { patient_ = patient; }
  void announce_end(ControlKind kind, std::string_view sentence) override;
  void linger(int64_t limit_us) override;

 private:
  struct Line {  // a connection and whose it is
    Peer* peer;
    Connection* connection;
  };

  Status alive() const;
  Status fail(Status status);
  Status lose(Peer& peer);
  static Status departed(const Peer& peer);
  Status timed_out() const;

  Status pass(bool& moved);
  Status read(Line& line, bool& moved);
  Status judge();
  Status rest(bool may_spin, int64_t& spin_until_us, int64_t limit_us);
  void poll_lines(int timeout_ms);
  void nudge();
  void note_control(size_t from);

  const int rank_;
  const uint64_t epoch_;
  const Config config_;
  AbortSignal& abort_;
  std::function<void()> while_waiting_;
  std::deque<Peer> peers_;      // not a vector: a Peer does not move
  std::vector<Line> lines_;     // all connections
  std::vector<pollfd> polled_;  // one for each line, then the wake-up descriptor
  Socket wake_fd_;
  std::deque<ControlFrame> inbox_;
  bool just_read_ = false;  // next_control() has given out a frame and not said "none" since
  Status failed_;           // the first failure; final
  bool unwell_ = false;     // some peer has left or has a broken connection: judge() before sleeping
  bool patient_ = false;
  int64_t lively_us_ = 0;            // about when a byte last moved
  std::atomic<bool> talked_{false};  // a byte has moved since lively_us_ was set
  std::atomic<bool> woken_{false};   // wake() was called; the next wait() takes it

  // Whoever wants the driver to look again sets nudged_ and then writes to the descriptor only if it sees sleeping_;
  // the driver sets sleeping_ and then looks at nudged_. All sequentially consistent, so one of the two sees the other.
  std::atomic<bool> nudged_{false};
  std::atomic<bool> sleeping_{false};
};

// -- life -------------------------------------------------------------------------------------------------------------

Status SocketMesh::open(std::vector<MeshPeer> peers, std::vector<std::vector<Socket>> sockets) {
  if (rank_ < 0 || rank_ >= static_cast<int>(peers.size()) || peers.size() > UINT16_MAX) {
    return {Code::invalid_argument,
            "A mesh of " + std::to_string(peers.size()) + " members has no rank " + std::to_string(rank_) + "."};
  }
  wake_fd_ = Socket(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (wake_fd_.fd() < 0) {
    return {Code::internal, std::string("This process can't open an eventfd: ") + std::strerror(errno) +
                                ". Raise its limit of open files (ulimit -n)."};
  }
  peers_.resize(peers.size());
  for (size_t r = 0; r < peers.size(); ++r) {
    Peer& peer = peers_[r];
    peer.label = std::move(peers[r].label);
    if (static_cast<int>(r) == rank_) continue;
    if (sockets[r].empty()) {
      return {Code::invalid_argument, "There is no connection to " + peer.label + "."};
    }
    for (Socket& socket : sockets[r]) {
      if (!wire::prepare_stream(socket.fd())) {
        return {Code::invalid_argument,
                "A connection to " + peer.label + " is no usable stream socket: " + std::strerror(errno) + "."};
      }
      Connection::Identity identity{epoch_, static_cast<uint16_t>(rank_), static_cast<uint16_t>(r),
                                    peer.connections.empty(), peer.label};
      peer.connections.push_back(std::make_unique<Connection>(std::move(socket), std::move(identity)));
    }
  }
  for (Peer& peer : peers_) {
    for (const auto& connection : peer.connections) {
      lines_.push_back({&peer, connection.get()});
      polled_.push_back({connection->fd(), 0, 0});
    }
  }
  polled_.push_back({wake_fd_.fd(), POLLIN, 0});
  return {};
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

Status SocketMesh::departed(const Peer& peer) { return {Code::left, peer.sentence}; }

// A connection of `peer` is gone and the peer has not said why. Before it is blamed, look for an abort frame that has
// arrived, from this peer or from another: that is the root cause, and the end of the connection only follows from it.
Status SocketMesh::lose(Peer& peer) {
  for (Line& line : lines_) line.connection->drop_transfers();
  for (Peer& other : peers_) {
    if (other.connections.empty() || other.left || other.aborted) continue;
    Connection& connection = *other.connections[0];
    const size_t before = inbox_.size();
    for (int i = 0; i < 16; ++i) {  // some 64 MB: a peer may be sending a lot
      const Progress progress = connection.read(inbox_);
      if (!progress.moved || !progress.status.ok()) break;
    }
    note_control(before);
  }
  if (!failed_.ok()) return failed_;  // an abort frame was among them
  if (peer.left) return fail(departed(peer));
  const std::string how = peer.error == 0 ? "the other side closed it" : std::strerror(peer.error);
  return fail({Code::aborted, peer.label + " was lost: its connection ended (" + how + ")."});
}

Status SocketMesh::timed_out() const {
  std::string waiting;
  uint64_t expected = 0;
  uint64_t owed = 0;
  int count = 0;
  for (const Peer& peer : peers_) {
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
  return {Code::timeout, waiting + (count == 1 ? " has" : " have") + " made no progress for " +
                             std::to_string(config_.progress_timeout_ms) + " ms in an operation that every rank had " +
                             "started (" + std::to_string(expected) + " bytes not received" +
                             (owed > 0 ? ", and it does not take what this rank sends" : "") + ")."};
}

// -- moving bytes -----------------------------------------------------------------------------------------------------

Status SocketMesh::exchange(std::span<const Transfer> sends, std::span<const Transfer> receives) {
  Flight flight;
  HVD_TRY(start(sends, receives, flight));
  return finish(flight);
}

Status SocketMesh::start(std::span<const Transfer> sends, std::span<const Transfer> receives, Flight& flight) {
  if (Status status = alive(); !status.ok()) return fail(std::move(status));
  const auto queue = [&](const Transfer& transfer, bool sending) -> Status {
    const uint64_t bytes = length_of(transfer);
    if (bytes == 0) return {};
    if (transfer.peer < 0 || transfer.peer >= size() || transfer.peer == rank_) {
      return fail({Code::internal, "A transfer was started with rank " + std::to_string(transfer.peer) +
                                       " of the mesh, which is not a peer."});
    }
    Peer& peer = peers_[transfer.peer];
    if (sending && peer.left) return fail(departed(peer));
    const int connections = static_cast<int>(peer.connections.size());
    const int stripes = wire::stripe_count(bytes, connections);
    const uint64_t number = sending ? peer.sent++ : peer.received++;
    const int first = wire::first_connection(bytes, number, connections);
    flight.open += stripes;
    cut(transfer, bytes, stripes, [&](Stripe&& stripe, int index) {
      stripe.number = number;
      stripe.flight = &flight;
      Connection& connection = *peer.connections[(first + index) % connections];
      if (sending) {
        connection.queue_send(std::move(stripe));
      } else {
        connection.queue_receive(std::move(stripe));
        connection.readable = true;  // it may have come before we asked for it
      }
    });
    return {};
  };
  for (const Transfer& transfer : receives) HVD_TRY(queue(transfer, false));
  for (const Transfer& transfer : sends) HVD_TRY(queue(transfer, true));
  for (const Transfer& transfer : sends) {
    if (transfer.peer < 0 || transfer.peer >= size()) continue;
    for (const auto& connection : peers_[transfer.peer].connections) {
      if (connection->owes() && connection->writable) (void)connection->write();  // a failure shows when we read
    }
  }
  return {};
}

Status SocketMesh::finish(Flight& flight) {
  if (Status status = alive(); !status.ok()) return fail(std::move(status));
  int64_t progress_us = 0;  // read the clock only when there is nothing else to do
  int64_t spin_until_us = 0;
  while (flight.open > 0) {
    bool moved = false;
    HVD_TRY(pass(moved));
    if (flight.open == 0) break;
    if (moved) {
      progress_us = spin_until_us = 0;
      continue;
    }
    if (abort_.raised()) return fail(abort_.cause());
    if (unwell_) HVD_TRY(judge());
    const int64_t now = now_us();
    if (progress_us == 0) progress_us = now;
    const int64_t limit_us = progress_us + config_.progress_timeout_ms * 1000;
    if (now >= limit_us) return fail(timed_out());
    bool small = true;
    for (const Line& line : lines_) {
      small = small && !line.connection->owes() && line.connection->expected_bytes() <= kSpinBytes;
    }
    if (while_waiting_) while_waiting_();
    HVD_TRY(rest(small, spin_until_us, limit_us));
  }
  return {};
}

Status SocketMesh::progress(bool& busy) {
  if (Status status = alive(); !status.ok()) return fail(std::move(status));
  poll_lines(0);
  bool moved = false;
  HVD_TRY(pass(moved));
  if (unwell_) HVD_TRY(judge());
  busy = std::any_of(lines_.begin(), lines_.end(),
                     [](const Line& line) { return line.connection->owes() || line.connection->expects(); });
  return {};
}

// Moves what can be moved without waiting.
Status SocketMesh::pass(bool& moved) {
  for (Line& line : lines_) {
    Connection& connection = *line.connection;
    if (connection.writable && connection.wants_write()) moved = connection.write().moved || moved;
    if (connection.readable && connection.wants_read()) HVD_TRY(read(line, moved));
    if (connection.write_failed()) unwell_ = true;
  }
  if (moved) talked_.store(true, std::memory_order_relaxed);
  return {};
}

Status SocketMesh::read(Line& line, bool& moved) {
  Peer& peer = *line.peer;
  const size_t before = inbox_.size();
  Progress progress = line.connection->read(inbox_);
  moved = moved || progress.moved;
  note_control(before);
  if (!failed_.ok()) return failed_;
  if (!progress.status.ok()) return fail(std::move(progress.status));
  if (!progress.ended) return {};
  unwell_ = true;
  if (peer.left) return {};
  peer.error = progress.error;
  return line.connection == peer.connections[0].get() ? lose(peer) : Status();
}

// What follows from departed peers and broken connections, once there is nothing left to read.
Status SocketMesh::judge() {
  const int64_t now = now_us();
  for (Peer& peer : peers_) {
    bool broken = false;
    for (const auto& connection : peer.connections) {
      const bool ended = connection->ended() || connection->write_failed();
      const bool silent = ended || connection == peer.connections[0];  // nothing comes behind the leave frame
      if (peer.left && (connection->owes() || (silent && connection->expects()))) return fail(departed(peer));
      broken = broken || ended;
    }
    if (!broken || peer.left || peer.aborted) continue;
    // A connection other than the first has ended, or does not take anything: give the peer a moment to tell why.
    if (peer.broken_at_us == 0) peer.broken_at_us = now;
    if (now - peer.broken_at_us >= kGraceUs) return lose(peer);
  }
  return {};
}

// Takes up what arrived in inbox_ from index `from` on.
void SocketMesh::note_control(size_t from) {
  for (size_t i = from; i < inbox_.size(); ++i) {
    ControlFrame& frame = inbox_[i];
    Peer& peer = peers_[frame.peer];
    if (frame.kind == ControlKind::leave) {
      if (frame.text.find("has shut down") == std::string::npos) {
        frame.text = peer.label + " has shut down" + (frame.text.empty() ? "." : ": " + frame.text);
      }
      peer.sentence = frame.text;
      peer.left = unwell_ = true;
    } else if (frame.kind == ControlKind::abort) {
      if (frame.text.empty()) frame.text = peer.label + " ended the epoch.";
      peer.sentence = frame.text;
      peer.aborted = true;
      (void)fail({Code::aborted, frame.text});
    }
  }
}

// Nothing could be moved: look again for a short time, then sleep until something can or the limit is near.
Status SocketMesh::rest(bool may_spin, int64_t& spin_until_us, int64_t limit_us) {
  const int64_t now = now_us();
  if (spin_until_us == 0) spin_until_us = now + (patient_ ? config_.yield_us : config_.spin_us);
  if (may_spin && now < spin_until_us) {
    if (lines_.size() <= 2) {
      for (Line& line : lines_) line.connection->readable = true;
    } else {
      poll_lines(0);
    }
    sched_yield();
    return {};
  }
  const int64_t sleep_us = std::max<int64_t>(limit_us - now, 0);
  poll_lines(static_cast<int>(std::min<int64_t>((sleep_us + 999) / 1000, kSliceMs)));
  return {};
}

void SocketMesh::poll_lines(int timeout_ms) {
  for (size_t i = 0; i < lines_.size(); ++i) {
    const Connection& connection = *lines_[i].connection;
    const bool reads = connection.wants_read();
    const bool writes = connection.wants_write();
    // Without an interest there must be no descriptor: poll() would report its end again and again.
    polled_[i].fd = reads || writes ? connection.fd() : -1;
    polled_[i].events = static_cast<short>((reads ? POLLIN : 0) | (writes ? POLLOUT : 0));
    polled_[i].revents = 0;
  }
  polled_.back().revents = 0;
  if (timeout_ms > 0) {
    sleeping_.store(true);
    if (nudged_.exchange(false)) timeout_ms = 0;
  }
  const int ready = poll(polled_.data(), polled_.size(), timeout_ms);
  sleeping_.store(false);
  if (ready <= 0) return;
  constexpr short kEnd = POLLERR | POLLHUP | POLLNVAL;
  for (size_t i = 0; i < lines_.size(); ++i) {
    if (polled_[i].revents & (POLLIN | kEnd)) lines_[i].connection->readable = true;
    if (polled_[i].revents & (POLLOUT | kEnd)) lines_[i].connection->writable = true;
  }
  if (polled_.back().revents & POLLIN) {
    uint64_t count;
    (void)!::read(wake_fd_.fd(), &count, sizeof(count));
  }
}

// -- control frames ---------------------------------------------------------------------------------------------------

Status SocketMesh::send_control(int peer, ControlKind kind, std::span<const uint32_t> ids, std::string_view text) {
  if (peer < 0 || peer >= size() || peer == rank_ || ids.size() > wire::kMaxControlIds ||
      text.size() > wire::kMaxControlText) {
    return {Code::internal, "A control frame of " + std::to_string(ids.size()) + " ids and " +
                                std::to_string(text.size()) + " bytes for rank " + std::to_string(peer) +
                                " of the mesh can't be sent."};
  }
  if (abort_.raised()) return abort_.cause();
  if (!peers_[peer].connections[0]->send_control(kind, ids, text)) {
    nudge();  // a sleeping driver does not wait for this socket to take more; now it will
  }
  talked_.store(true, std::memory_order_relaxed);
  return {};
}

Status SocketMesh::next_control(ControlFrame& frame, bool& found) {
  found = false;
  if (inbox_.empty()) {
    HVD_TRY(alive());
    if (std::exchange(just_read_, false)) return {};  // the frames before this answer cost a look already
    if (lines_.size() <= 2) {
      for (Line& line : lines_) line.connection->readable = true;
    } else {
      poll_lines(0);
    }
    bool moved = false;
    Status status = pass(moved);
    if (!status.ok() && inbox_.empty()) return status;
  }
  if (inbox_.empty()) return {};
  frame = std::move(inbox_.front());
  inbox_.pop_front();
  found = just_read_ = true;
  return {};
}

Status SocketMesh::wait(int64_t timeout_us) {
  const int64_t start = now_us();
  const int64_t limit_us = start + std::max<int64_t>(timeout_us, 0);
  if (talked_.exchange(false, std::memory_order_relaxed)) lively_us_ = start;
  const bool lively = start - lively_us_ < kLivelyUs;
  int64_t spin_until_us = 0;
  for (;;) {
    if (abort_.raised()) return fail(abort_.cause());
    if (!inbox_.empty()) return {};
    HVD_TRY(alive());
    if (woken_.exchange(false)) return {};
    bool moved = false;
    Status status = pass(moved);
    if (!inbox_.empty()) return {};
    HVD_TRY(std::move(status));
    if (moved) continue;
    if (unwell_) HVD_TRY(judge());
    if (now_us() >= limit_us) return {};
    HVD_TRY(rest(lively, spin_until_us, limit_us));
  }
}

void SocketMesh::wake() {
  woken_.store(true);
  nudge();
}

void SocketMesh::nudge() {
  nudged_.store(true);
  if (!sleeping_.load()) return;
  const uint64_t one = 1;
  (void)!::write(wake_fd_.fd(), &one, sizeof(one));
}

void SocketMesh::announce_end(ControlKind kind, std::string_view sentence) {
  for (Peer& peer : peers_) {
    if (peer.connections.empty() || peer.left || peer.aborted) continue;
    (void)peer.connections[0]->send_control(kind, {}, sentence.substr(0, kMaxSentence));
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
        line.connection->end_output();
      } else {
        full.push_back({line.connection->fd(), POLLOUT, 0});
      }
    }
    const int64_t left_us = deadline - now_us();
    if (full.empty() || left_us <= 0) return;
    (void)poll(full.data(), full.size(), static_cast<int>((left_us + 999) / 1000));
  }
}

}  // namespace

std::unique_ptr<Mesh> Mesh::create(int rank, uint64_t epoch, std::vector<MeshPeer> peers, const Config& config,
                                   AbortSignal& abort, Status& status) {
  std::vector<std::vector<Socket>> sockets(peers.size());  // first of all: whatever happens, they will be closed
  for (size_t r = 0; r < peers.size(); ++r) {
    for (const int fd : peers[r].fds) sockets[r].emplace_back(fd);
  }
  auto mesh = std::make_unique<SocketMesh>(rank, epoch, config, abort);
  status = mesh->open(std::move(peers), std::move(sockets));
  if (!status.ok()) return nullptr;
  return mesh;
}

}  // namespace horovod
