// What the driver does in a mesh over sockets: which connection may move bytes, and when to sleep.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include <poll.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/interrupt.h"
#include "base/limits.h"
#include "transport/socket_mesh.h"

namespace horovod {

using wire::Connection;
using wire::Progress;
using wire::Stripe;

namespace {

// How much of the data is kept that no transfer here expects yet: of one peer, and of all. 16 MB is more than the two
// sockets of a connection hold by default together with the frame behind which a control frame may wait.
constexpr size_t kMostAheadBytes = 16u << 20;
constexpr size_t kAllAheadBytes = 256u << 20;
constexpr uint32_t kFullLook = 64;  // one in so many looks is at all connections

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
}  // namespace

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
      return fail(
          {Code::internal, error_code::internal,
           "A transfer was started with rank " + std::to_string(transfer.peer) + " of the mesh, which is not a peer."});
    }
    SocketPeer& peer = peers_[transfer.peer];
    if (peer.connections.empty()) return fail(no_partner(peer));
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
        connection.readable = true;  // the data may have come before it was asked for
      }
    });
    return {};
  };
  for (const Transfer& transfer : receives) HVD_TRY(queue(transfer, false));
  for (const Transfer& transfer : sends) HVD_TRY(queue(transfer, true));
  for (const Transfer& transfer : sends) {
    if (transfer.peer < 0 || transfer.peer >= size()) continue;
    for (const auto& connection : peers_[transfer.peer].connections) {
      if (connection->owes() && connection->writable) (void)connection->write();  // an error comes again in a read
    }
  }
  return {};
}

Status SocketMesh::finish(Flight& flight) {
  if (Status status = alive(); !status.ok()) return fail(std::move(status));
  int64_t progress_us = 0;  // read the clock only when there is nothing else to do
  Wait wait(polling());
  int64_t asked_us = 0;  // when this thread last checked for a signal
  while (flight.open > 0) {
    bool moved = false;
    HVD_TRY(pass(moved));
    if (flight.open == 0) break;
    if (moved) {
      progress_us = 0;
      wait.restart();
      continue;
    }
    if (abort_.raised()) return fail(abort_.cause());
    if (unwell_) HVD_TRY(judge());
    const int64_t now = now_us();
    HVD_TRY(look_ahead(now));
    HVD_TRY(look_for_silence(now));
    if (progress_us == 0) progress_us = now;
    const int64_t limit_us = progress_us + config_.progress_timeout_ms * 1000;
    if (now >= limit_us) return fail(timed_out());
    // When something is being received, the rest follows sooner than a sleeping thread wakes. When a peer takes
    // nothing, that
    // may last long.
    const bool all_sent =
        std::none_of(lines_.begin(), lines_.end(), [](const Line& line) { return line.connection->owes(); });
    if (while_waiting_) {
      if (Status status = while_waiting_(); !status.ok()) return fail(std::move(status));
    }
    if (t_interrupt_hook && now - std::max(asked_us, progress_us) > limits::kSignalCheckUs) {
      asked_us = now;
      if (t_interrupt_hook()) {
        abort_.raise({Code::interrupted, error_code::interrupted,
                      capitalized(peers_[rank()].label) + " was interrupted by a signal during an operation."});
        return fail(abort_.cause());
      }
    }
    HVD_TRY(rest(all_sent, wait, limit_us, nullptr));
  }
  return {};
}

Status SocketMesh::progress(bool& busy) {
  if (Status status = alive(); !status.ok()) return fail(std::move(status));
  look();
  bool moved = false;
  HVD_TRY(pass(moved));
  if (unwell_) HVD_TRY(judge());
  HVD_TRY(look_ahead(now_us()));
  HVD_TRY(look_for_silence(now_us()));
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
  SocketPeer& peer = *line.peer;
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
  for (SocketPeer& peer : peers_) {
    bool broken = false;
    for (const auto& connection : peer.connections) {
      const bool ended = connection->ended() || connection->write_failed();
      const bool silent = ended || connection == peer.connections[0];  // no bytes come behind the leave frame
      if (peer.left && (connection->owes() || (silent && connection->expects()))) return fail(departed(peer));
      broken = broken || ended;
    }
    if (!broken || peer.left || peer.aborted) continue;
    // A connection other than the first has ended or takes nothing: the peer gets a moment to say why.
    if (peer.broken_at_us == 0) peer.broken_at_us = now;
    if (now - peer.broken_at_us >= limits::kBrokenGraceUs) return lose(peer);
  }
  return {};
}

// Looks for the end of a peer's epoch behind data of that peer. This rank can't use such data before other ranks have
// done their part, which they may never do when an epoch has ended. Called again and again; it looks only now and then,
// and only at peers whose data was there at the last look as well.
Status SocketMesh::look_ahead(int64_t now) {
  if (now - looked_ahead_us_ < config_.look_ahead_us) return {};
  looked_ahead_us_ = now;
  for (SocketPeer& peer : peers_) {
    if (peer.connections.empty() || peer.left || peer.aborted) continue;
    Connection& connection = *peer.connections[0];
    if (!std::exchange(peer.stalled, connection.stalled()) || !connection.stalled()) continue;
    wire::Ahead ahead = connection.look_ahead(std::min(kMostAheadBytes, kAllAheadBytes / peers_.size()));
    if (!ahead.status.ok()) return fail(std::move(ahead.status));
    if (ahead.end) {
      // A peer that left in order has done its part: others need nothing of it but what it sent before.
      if (ahead.end->kind == ControlKind::leave) continue;
      inbox_.push_back(std::move(*ahead.end));
      note_control(inbox_.size() - 1);
      return failed_;
    }
    if (!ahead.ended) continue;
    unwell_ = true;
    peer.error = ahead.error;
    return lose(peer);
  }
  return {};
}

// Looks now and then for a peer whose host acknowledges nothing.
Status SocketMesh::look_for_silence(int64_t now) {
  if (now - looked_for_silence_us_ < limits::kSilenceCheckUs) return {};
  looked_for_silence_us_ = now;
  for (SocketPeer& peer : peers_) {
    if (peer.left || peer.aborted) continue;
    for (const auto& connection : peer.connections) {
      if (connection->silent_ms(now / 1000) < config_.unreachable_timeout_ms) continue;
      unwell_ = true;
      peer.error = ETIMEDOUT;
      return lose(peer);
    }
  }
  return {};
}

// Handles the frames in inbox_ from index `from` on.
void SocketMesh::note_control(size_t from) {
  for (size_t i = from; i < inbox_.size(); ++i) {
    ControlFrame& frame = inbox_[i];
    SocketPeer& peer = peers_[frame.peer];
    if (frame.kind == ControlKind::leave) {
      if (!has_code(frame.text)) {  // else it is a whole sentence
        frame.text = coded(error_code::shut_down,
                           capitalized(peer.label) + " has shut down" + (frame.text.empty() ? "." : ": " + frame.text));
      }
      peer.sentence = frame.text;
      peer.left = unwell_ = true;
    } else if (frame.kind == ControlKind::abort) {
      if (frame.text.empty())
        frame.text = coded(error_code::peer_lost, capitalized(peer.label) + " ended this world without a reason.");
      peer.sentence = frame.text;
      peer.aborted = true;
      (void)fail({Code::aborted, frame.text});
    }
  }
}

// Nothing could be moved: look again for a short time, then sleep until something can or the limit is near.
Status SocketMesh::rest(bool may_poll, Wait& wait, int64_t limit_us, PollSource* source) {
  const int64_t now = now_us();
  if (wait.phase(now) != Wait::sleeps && may_poll) {
    look();
    wait.turn(now);
    return {};
  }
  const int64_t sleep_us = std::clamp<int64_t>(limit_us - now, 0, limits::kPeerCheckUs);
  poll_lines(static_cast<int>((sleep_us + 999) / 1000), source);
  return {};
}

// Marks connections that may have something to read: those that data is expected from or, when there is none, those
// where news is likely. To read from a few, of which most have nothing, costs less than to ask poll() about all.
void SocketMesh::look() {
  size_t expecting = 0;
  bool blocked = false;
  for (const Line& line : lines_) {
    expecting += line.connection->expects() ? 1 : 0;
    blocked = blocked || line.connection->wants_write();
  }
  const bool all_likely = likely_.size() == lines_.size();
  if (blocked || expecting > kMostLikely || (expecting == 0 && likely_.empty()) ||
      (!all_likely && ++looks_ % kFullLook == 0)) {
    poll_lines(0);
  } else if (expecting > 0) {
    for (const Line& line : lines_) line.connection->readable = line.connection->readable || line.connection->expects();
  } else {
    for (Connection* connection : likely_) connection->readable = true;
  }
}

void SocketMesh::poll_lines(int timeout_ms, PollSource* source) {
  for (size_t i = 0; i < lines_.size(); ++i) {
    const Connection& connection = *lines_[i].connection;
    const bool reads = connection.wants_read();
    const bool writes = connection.wants_write();
    // A descriptor without events is left out: poll() would report its end again and again.
    polled_[i].fd = reads || writes ? connection.fd() : -1;
    polled_[i].events = static_cast<short>((reads ? POLLIN : 0) | (writes ? POLLOUT : 0));
    polled_[i].revents = 0;
  }
  polled_.back().revents = 0;
  if (timeout_ms > 0) {
    sleeping_.store(true);
    if (nudged_.exchange(false)) timeout_ms = 0;
    if (source) {
      source->sleeping(true);
      if (source->news()) timeout_ms = 0;
    }
  }
  const int ready = poll(polled_.data(), polled_.size(), timeout_ms);
  sleeping_.store(false);
  if (source) source->sleeping(false);
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
    return {Code::internal, error_code::internal,
            "A control frame of " + std::to_string(ids.size()) + " ids and " + std::to_string(text.size()) +
                " bytes for rank " + std::to_string(peer) + " of the mesh can't be sent."};
  }
  if (abort_.raised()) return abort_.cause();
  if (peers_[peer].connections.empty()) return no_partner(peers_[peer]);
  if (!peers_[peer].connections[0]->send_control(kind, ids, text)) {
    nudge();  // a sleeping driver does not wait until this socket takes more, so it is woken to do so
  }
  talked_.store(true, std::memory_order_relaxed);
  return {};
}

Status SocketMesh::next_control(ControlFrame& frame, bool& found) {
  found = false;
  if (inbox_.empty()) {
    HVD_TRY(alive());
    if (std::exchange(just_read_, false)) return {};  // there was a look before the frames that came before this answer
    look();
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
  const bool lively = start - lively_us_ < limits::kLivelyUs;
  Wait wait(polling());
  for (;;) {
    if (abort_.raised()) return fail(abort_.cause());
    if (!inbox_.empty()) return {};
    HVD_TRY(alive());
    if (woken_.exchange(false) || (poll_source_ && poll_source_->news())) return {};
    bool moved = false;
    Status status = pass(moved);
    if (!inbox_.empty()) return {};
    HVD_TRY(std::move(status));
    if (moved) continue;
    if (unwell_) HVD_TRY(judge());
    const int64_t now = now_us();
    if (now >= limit_us) return {};
    HVD_TRY(look_ahead(now));
    HVD_TRY(look_for_silence(now));
    HVD_TRY(rest(lively, wait, limit_us, poll_source_));
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

}  // namespace horovod
