#include "transport/mesh_connection.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include <sys/socket.h>

namespace horovod::wire {
namespace {

constexpr size_t kMaxPieces = 256;  // of one system call: far below IOV_MAX, and enough to be worth the call
constexpr uint64_t kMaxWriteBytes = 512u << 10;  // so that reading and writing take turns
constexpr uint64_t kMaxReadBytes = 4u << 20;     // of one read(): other connections want their turn
constexpr size_t kBufferBytes = 32u << 10;       // small frames arrive whole, in one system call
constexpr size_t kDataBufferBytes = 4u << 10;    // when much data is next, so that little is copied through the buffer
constexpr uint64_t kSmallBytes = 16u << 10;

// One piece, which most frames of small operations are, costs the kernel less without a list of pieces around it.
ssize_t send_pieces(int fd, iovec* pieces, size_t count) {
  constexpr int kFlags = MSG_NOSIGNAL | MSG_DONTWAIT;
  if (count == 1) return send(fd, pieces[0].iov_base, pieces[0].iov_len, kFlags);
  msghdr message{};
  message.msg_iov = pieces;
  message.msg_iovlen = count;
  return sendmsg(fd, &message, kFlags);
}

ssize_t receive_pieces(int fd, iovec* pieces, size_t count) {
  if (count == 1) return recv(fd, pieces[0].iov_base, pieces[0].iov_len, MSG_DONTWAIT);
  msghdr message{};
  message.msg_iov = pieces;
  message.msg_iovlen = count;
  return recvmsg(fd, &message, MSG_DONTWAIT);
}

}  // namespace

size_t Stripe::peek(iovec* out, size_t room, uint64_t limit, uint64_t& bytes) const {
  size_t count = 0;
  size_t skip = inside;
  for (size_t i = piece; i < pieces.size() && count < room && limit > 0; ++i) {
    const size_t size = static_cast<size_t>(std::min<uint64_t>(pieces[i].iov_len - skip, limit));
    if (size > 0) {
      out[count++] = {static_cast<std::byte*>(pieces[i].iov_base) + skip, size};
      limit -= size;
      bytes += size;
    }
    skip = 0;
  }
  return count;
}

void Stripe::advance(uint64_t bytes) {
  left -= bytes;
  while (bytes > 0) {
    const uint64_t size = std::min<uint64_t>(pieces[piece].iov_len - inside, bytes);
    inside += size;
    bytes -= size;
    if (inside == pieces[piece].iov_len) {
      ++piece;
      inside = 0;
    }
  }
}

void Stripe::fill(const std::byte* from, size_t bytes) {
  while (bytes > 0) {
    const size_t size = std::min(pieces[piece].iov_len - inside, bytes);
    if (size > 0) std::memcpy(static_cast<std::byte*>(pieces[piece].iov_base) + inside, from, size);
    from += size;
    bytes -= size;
    left -= size;
    inside += size;
    if (inside == pieces[piece].iov_len) {
      ++piece;
      inside = 0;
    }
  }
}

Connection::Connection(Socket socket, Identity identity, std::unique_ptr<SealedStream> sealed)
    : socket_(std::move(socket)), identity_(std::move(identity)), sealed_(std::move(sealed)), buffer_(kBufferBytes) {}

ssize_t Connection::put(iovec* pieces, size_t count) {
  return sealed_ ? sealed_->send(fd(), pieces, count) : send_pieces(fd(), pieces, count);
}

ssize_t Connection::take(iovec* pieces, size_t count) {
  return sealed_ ? sealed_->receive(fd(), pieces, count) : receive_pieces(fd(), pieces, count);
}

Status Connection::forged() const {
  return {Code::aborted, error_code::tampered_data,
          "What came from " + identity_.label + " to " + identity_.own_label + " is not what was sent: record " +
              std::to_string(sealed_->received_records()) +
              " of the connection has no valid tag (HOROVOD_WIRE). Something between the two changed, "
              "repeated, left out or reordered data, so this world ends."};
}

// -- sending ----------------------------------------------------------------------------------------------------------

Progress Connection::write() {
  const std::lock_guard<std::mutex> lock(mutex_);
  Progress progress = flush(true);
  if (!sealed_flights_.empty() && !sealed_->waits()) {
    for (Flight* flight : sealed_flights_) --flight->open;
    sealed_flights_.clear();
    progress.moved = true;
  }
  return progress;
}

bool Connection::send_control(ControlKind kind, std::span<const uint32_t> ids, std::string_view text) {
  const auto count = static_cast<uint32_t>(ids.size());
  const std::lock_guard<std::mutex> lock(mutex_);
  FrameHeader header;
  header.kind = static_cast<uint8_t>(kind);
  header.sender = identity_.rank;
  header.epoch = identity_.epoch;
  header.sequence = next_control_++;
  header.length = sizeof(count) + ids.size_bytes() + text.size();
  std::string frame;
  frame.reserve(sizeof(header) + header.length);
  frame.append(reinterpret_cast<const char*>(&header), sizeof(header));
  frame.append(reinterpret_cast<const char*>(&count), sizeof(count));
  frame.append(reinterpret_cast<const char*>(ids.data()), ids.size_bytes());
  frame.append(text);
  control_.push_back(std::move(frame));
  if (!frame_started_) (void)flush(false);  // the driver gets an error again when it reads
  control_waits_.store(!control_.empty() || sealed_waits(), std::memory_order_release);
  return control_.empty() && !sealed_waits();
}

Progress Connection::flush(bool with_data) {
  Progress progress;
  for (uint64_t budget = kMaxReadBytes; budget > 0;) {
    if (write_failed_.load(std::memory_order_relaxed)) {
      control_.clear();  // no frame will be sent any more
      control_sent_ = 0;
      break;
    }
    if (sealed_waits() && !sealed_->flush(fd())) {
      if (errno == EAGAIN) {
        if (with_data) writable = false;
      } else {
        progress.ended = true;
        progress.error = errno;
        write_failed_.store(true, std::memory_order_relaxed);
      }
      break;
    }
    iovec pieces[kMaxPieces];
    size_t count = 0;
    uint64_t control_bytes = 0;
    uint64_t bytes = 0;
    if (!frame_started_) {
      size_t skip = control_sent_;
      for (std::string& frame : control_) {
        if (count == kMaxPieces - 2) break;
        pieces[count++] = {frame.data() + skip, frame.size() - skip};
        control_bytes += frame.size() - skip;
        skip = 0;
      }
    }
    if (with_data && !outgoing_.empty()) {
      const Stripe& stripe = outgoing_.front();
      if (out_header_left_ == 0 && out_frame_left_ == 0) {
        out_frame_left_ = std::min(stripe.left, kMaxFrameBytes);
        out_header_ = {};
        out_header_.sender = identity_.rank;
        out_header_.epoch = identity_.epoch;
        out_header_.sequence = stripe.number;
        out_header_.length = out_frame_left_;
        out_header_left_ = sizeof(out_header_);
      }
      if (out_header_left_ > 0) {
        std::byte* const end = reinterpret_cast<std::byte*>(&out_header_) + sizeof(out_header_);
        pieces[count++] = {end - out_header_left_, out_header_left_};
        bytes += out_header_left_;
      }
      count += stripe.peek(pieces + count, kMaxPieces - count, std::min(out_frame_left_, kMaxWriteBytes), bytes);
    }
    if (count == 0) break;
    const ssize_t sent = put(pieces, count);
    if (sent < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS || errno == ENOMEM) {
        if (with_data) writable = false;
        break;
      }
      progress.ended = true;
      progress.error = errno;
      write_failed_.store(true, std::memory_order_relaxed);
      break;
    }
    const auto done = static_cast<uint64_t>(sent);
    progress.moved = true;
    advance_output(done, control_bytes);
    if (sealed_ ? sealed_->waits() : done < control_bytes + bytes) {
      if (with_data) writable = false;
      break;
    }
    budget -= std::min(budget, done);
  }
  control_waits_.store(!control_.empty() || sealed_waits(), std::memory_order_release);
  return progress;
}

void Connection::advance_output(uint64_t bytes, uint64_t control_bytes) {
  uint64_t control = std::min(bytes, control_bytes);
  bytes -= control;
  while (control > 0) {
    const uint64_t size = std::min<uint64_t>(control, control_.front().size() - control_sent_);
    control_sent_ += size;
    control -= size;
    if (control_sent_ == control_.front().size()) {
      control_.pop_front();
      control_sent_ = 0;
    }
  }
  if (bytes == 0) return;
  frame_started_ = true;
  const size_t header = std::min<uint64_t>(bytes, out_header_left_);
  out_header_left_ -= header;
  bytes -= header;
  Stripe& stripe = outgoing_.front();
  stripe.advance(bytes);
  out_frame_left_ -= bytes;
  if (out_header_left_ > 0 || out_frame_left_ > 0) return;
  frame_started_ = false;
  if (stripe.left > 0) return;
  if (sealed_) {
    sealed_flights_.push_back(stripe.flight);
  } else {
    --stripe.flight->open;
  }
  outgoing_.pop_front();
}

// -- receiving --------------------------------------------------------------------------------------------------------

Progress Connection::read(std::deque<ControlFrame>& inbox) {
  Progress progress;
  progress.status = parse(inbox);  // the bytes that an earlier call could not parse yet
  for (uint64_t budget = kMaxReadBytes; budget > 0 && progress.status.ok() && wants_read();) {
    iovec pieces[kMaxPieces];
    size_t count = 0;
    uint64_t data_bytes = 0;
    if (in_frame_left_ > 0 && !discarding_) {
      count = incoming_.front().peek(pieces, kMaxPieces - 1, in_frame_left_, data_bytes);
    }
    if (buffer_begin_ > 0) {
      std::memmove(buffer_.data(), buffer_.data() + buffer_begin_, buffered());
      buffer_end_ = buffered();
      buffer_begin_ = 0;
      if (buffer_end_ == 0 && buffer_.size() > kMaxControlBytes + sizeof(FrameHeader)) {  // look_ahead() made it large
        buffer_ = std::vector<std::byte>(kBufferBytes);
      }
    }
    size_t room = buffer_.size() - buffer_end_;
    if (expected_bytes() > kSmallBytes && buffer_end_ < kDataBufferBytes) {
      room = std::min(room, kDataBufferBytes - buffer_end_);
    }
    const bool with_buffer = data_bytes == (discarding_ ? 0 : in_frame_left_);
    if (with_buffer) pieces[count++] = {buffer_.data() + buffer_end_, room};
    const ssize_t received = take(pieces, count);
    if (received < 0) {
      if (errno == EINTR) continue;
      if (sealed_ && errno == EBADMSG) {
        progress.status = forged();
        break;
      }
      if (errno == EAGAIN || errno == EWOULDBLOCK) {
        readable = false;
        break;
      }
      progress.error = errno;
    }
    if (received <= 0) {
      if (progress.error == 0) progress.error = error_ahead_;
      ended_ = progress.ended = true;
      break;
    }
    progress.moved = true;
    const auto bytes = static_cast<uint64_t>(received);
    const uint64_t landed = std::min(bytes, data_bytes);
    if (landed > 0) {
      incoming_.front().advance(landed);
      in_frame_left_ -= landed;
      if (in_frame_left_ == 0) finish_received_frame();
    }
    buffer_end_ += bytes - landed;
    progress.status = parse(inbox);
    if (bytes < data_bytes + (with_buffer ? room : 0)) {
      readable = false;  // the socket had no more bytes
      break;
    }
    budget -= std::min(budget, bytes);
  }
  return progress;
}

Ahead Connection::look_ahead(size_t most) {
  Ahead ahead;
  while (stalled_ && buffered() < most) {
    if (buffer_end_ == buffer_.size()) buffer_.resize(2 * buffer_.size());
    iovec piece{buffer_.data() + buffer_end_, buffer_.size() - buffer_end_};
    const ssize_t received = take(&piece, 1);
    if (received < 0 && errno == EINTR) continue;
    if (received < 0 && sealed_ && errno == EBADMSG) {
      ahead.status = forged();
      return ahead;
    }
    if (received < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
    if (received <= 0) {
      if (received < 0) error_ahead_ = errno;
      ahead.ended = true;
      ahead.error = error_ahead_;
      break;
    }
    buffer_end_ += static_cast<size_t>(received);
  }
  // Looks at whole frames only and checks nothing: a frame is checked when it is taken.
  for (size_t at = buffer_begin_; buffer_end_ - at >= sizeof(FrameHeader);) {
    FrameHeader header;
    std::memcpy(&header, buffer_.data() + at, sizeof(header));
    at += sizeof(header);
    if (header.magic != kMagic || header.length > buffer_end_ - at) break;
    const auto kind = static_cast<ControlKind>(header.kind);
    if (header.kind != kDataKind && (kind == ControlKind::abort || kind == ControlKind::leave) &&
        header.length >= sizeof(uint32_t) && header.length <= kMaxControlBytes) {
      ahead.end.emplace();
      ahead.end->peer = identity_.peer;
      ahead.end->kind = kind;
      ahead.end->text.assign(reinterpret_cast<const char*>(buffer_.data()) + at + sizeof(uint32_t),
                             header.length - sizeof(uint32_t));
      break;
    }
    at += header.length;
  }
  return ahead;
}

void Connection::finish_received_frame() {
  Stripe& stripe = incoming_.front();
  if (stripe.left > 0) return;
  --stripe.flight->open;
  incoming_.pop_front();
}

Status Connection::parse(std::deque<ControlFrame>& inbox) {
  for (;;) {
    if (in_frame_left_ > 0) {
      const size_t size = std::min<uint64_t>(in_frame_left_, buffered());
      if (size == 0) return {};
      if (!discarding_) incoming_.front().fill(buffer_.data() + buffer_begin_, size);
      buffer_begin_ += size;
      in_frame_left_ -= size;
      if (in_frame_left_ == 0 && !discarding_) finish_received_frame();
      continue;
    }
    FrameHeader header;
    if (buffered() < sizeof(header)) return {};
    std::memcpy(&header, buffer_.data() + buffer_begin_, sizeof(header));
    HVD_TRY(check(header));
    if (header.kind == kDataKind) {
      if (!discarding_) {
        if (incoming_.empty()) {
          stalled_ = true;
          return {};
        }
        const Stripe& stripe = incoming_.front();
        const uint64_t length = std::min(stripe.left, kMaxFrameBytes);
        if (header.sequence != stripe.number || header.length != length) {
          return {Code::aborted, error_code::unexpected_data,
                  capitalized(identity_.label) + " sent " + std::to_string(header.length) + " bytes of transfer " +
                      std::to_string(header.sequence) + " where this rank expected " + std::to_string(length) +
                      " bytes of transfer " + std::to_string(stripe.number) +
                      ": the ranks do not run the same operation, so this world ends."};
        }
      }
      buffer_begin_ += sizeof(header);
      in_frame_left_ = header.length;
      continue;
    }
    const size_t total = sizeof(header) + header.length;  // check() has bounded the length
    if (buffered() < total) {
      if (buffer_.size() < total) buffer_.resize(total);
      return {};
    }
    const std::byte* payload = buffer_.data() + buffer_begin_ + sizeof(header);
    uint32_t count = 0;
    std::memcpy(&count, payload, sizeof(count));
    if (count > kMaxControlIds || sizeof(count) + sizeof(uint32_t) * count > header.length) {
      return {Code::aborted, error_code::unexpected_data,
              capitalized(identity_.label) + " sent a control frame of " + std::to_string(header.length) +
                  " bytes that claims to hold " + std::to_string(count) + " ids; this world ends."};
    }
    ControlFrame frame;
    frame.peer = identity_.peer;
    frame.kind = static_cast<ControlKind>(header.kind);
    frame.ids.resize(count);
    if (count > 0) std::memcpy(frame.ids.data(), payload + sizeof(count), sizeof(uint32_t) * count);
    const size_t text_at = sizeof(count) + sizeof(uint32_t) * count;
    frame.text.assign(reinterpret_cast<const char*>(payload) + text_at, header.length - text_at);
    inbox.push_back(std::move(frame));
    ++expected_control_;
    buffer_begin_ += total;
  }
}

Status Connection::check(const FrameHeader& header) const {
  const auto bad = [this](const std::string& what) {
    return Status(Code::aborted, error_code::unexpected_data,
                  capitalized(identity_.label) + " sent " + what + "; this world ends.");
  };
  if (header.magic != kMagic || header.reserved != 0) return bad("bytes that are no frame of the data plane");
  if (header.epoch != identity_.epoch) {
    return bad("a frame of world " + std::to_string(header.epoch) + " on a connection of world " +
               std::to_string(identity_.epoch));
  }
  if (header.sender != identity_.peer) {
    return bad("a frame in the name of rank " + std::to_string(header.sender) + " of the mesh");
  }
  if (header.kind == kDataKind) {
    if (header.length == 0 || header.length > kMaxFrameBytes) {
      return bad("a data frame of " + std::to_string(header.length) + " bytes, outside of 1 to " +
                 std::to_string(kMaxFrameBytes));
    }
    return {};
  }
  if (header.kind > static_cast<uint8_t>(ControlKind::nudge) || !identity_.carries_control) {
    return bad("a frame of kind " + std::to_string(header.kind) + " that has no place on this connection");
  }
  if (header.length < sizeof(uint32_t) || header.length > kMaxControlBytes) {
    return bad("a control frame of " + std::to_string(header.length) + " bytes, outside of 4 to " +
               std::to_string(kMaxControlBytes));
  }
  if (header.sequence != expected_control_) {
    return bad("control frame " + std::to_string(header.sequence) + " where number " +
               std::to_string(expected_control_) + " was next");
  }
  return {};
}

// -- the end ----------------------------------------------------------------------------------------------------------

void Connection::drop_transfers() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (frame_started_) {
    // The real bytes and not zeros, as they may be the last that the peer needs to finish an operation.
    std::string rest(reinterpret_cast<const char*>(&out_header_) + sizeof(out_header_) - out_header_left_,
                     out_header_left_);
    rest.reserve(out_header_left_ + out_frame_left_);
    for (Stripe& stripe = outgoing_.front(); out_frame_left_ > 0;) {
      iovec piece{};
      uint64_t bytes = 0;
      (void)stripe.peek(&piece, 1, out_frame_left_, bytes);
      rest.append(static_cast<const char*>(piece.iov_base), bytes);
      stripe.advance(bytes);
      out_frame_left_ -= bytes;
    }
    control_.push_front(std::move(rest));
    control_waits_.store(true, std::memory_order_release);
    frame_started_ = false;
  }
  outgoing_.clear();
  sealed_flights_.clear();
  out_header_left_ = 0;
  out_frame_left_ = 0;
  incoming_.clear();
  discarding_ = true;
  stalled_ = false;
}

}  // namespace horovod::wire
