#include "transport/sealed_stream.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include <sys/socket.h>

namespace horovod::wire {

SealedStream::SealedStream(const crypto::Library& library, const Keys& keys, bool hides, uint64_t records_per_key)
    : sealer_(library, keys.send, crypto::Aead::Way::seal, hides, records_per_key),
      opener_(library, keys.receive, crypto::Aead::Way::open, hides, records_per_key),
      in_(2 * (kHeaderBytes + kMostPayload + crypto::kTagBytes)) {}

// -- sending ----------------------------------------------------------------------------------------------------------

ssize_t SealedStream::send(int fd, const iovec* pieces, size_t count) {
  if (waits() && !flush(fd)) return -1;
  out_.clear();
  sent_ = 0;
  size_t taken = 0;
  size_t piece = 0;
  size_t inside = 0;
  std::vector<iovec> parts;
  while (piece < count && taken < kMostSealed) {
    uint32_t payload = 0;
    parts.clear();
    while (piece < count && payload < kMostPayload) {
      const size_t size = std::min(pieces[piece].iov_len - inside, kMostPayload - payload);
      if (size > 0) parts.push_back({static_cast<std::byte*>(pieces[piece].iov_base) + inside, size});
      payload += static_cast<uint32_t>(size);
      inside += size;
      if (inside == pieces[piece].iov_len) {
        ++piece;
        inside = 0;
      }
    }
    if (payload == 0) break;
    const size_t at = out_.size();
    out_.resize(at + kHeaderBytes + payload + crypto::kTagBytes);
    std::memcpy(out_.data() + at, &payload, sizeof(payload));
    if (!sealer_.seal({out_.data() + at, kHeaderBytes}, parts, out_.data() + at + kHeaderBytes)) {
      out_.clear();  // no byte leaves this process unsealed
      errno = EIO;
      return -1;
    }
    taken += payload;
  }
  if (!flush(fd) && errno != EAGAIN) return -1;
  return static_cast<ssize_t>(taken);
}

bool SealedStream::flush(int fd) {
  while (waits()) {
    const ssize_t done = ::send(fd, out_.data() + sent_, out_.size() - sent_, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (done < 0) {
      if (errno == EINTR) continue;
      if (errno == EWOULDBLOCK || errno == ENOBUFS || errno == ENOMEM) errno = EAGAIN;
      return false;
    }
    sent_ += static_cast<size_t>(done);
  }
  return true;
}

// -- receiving --------------------------------------------------------------------------------------------------------

ssize_t SealedStream::receive(int fd, const iovec* pieces, size_t count) {
  size_t piece = 0;
  size_t inside = 0;
  size_t total = 0;
  for (;;) {
    do {
      total += deliver(pieces, count, piece, inside);
      if (piece == count) return static_cast<ssize_t>(total);
    } while (open_record());
    if (failed_ == 0) {
      std::memmove(in_.data(), in_.data() + in_begin_, in_end_ - in_begin_);
      in_end_ -= std::exchange(in_begin_, 0);
      plain_begin_ = plain_end_ = 0;
      const ssize_t got = recv(fd, in_.data() + in_end_, in_.size() - in_end_, MSG_DONTWAIT);
      if (got > 0) {
        in_end_ += static_cast<size_t>(got);
        continue;
      }
      if (got < 0 && errno == EINTR) continue;
      if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
        if (total > 0) return static_cast<ssize_t>(total);
        errno = EAGAIN;
        return -1;
      }
      if (got == 0 && in_end_ == 0) return static_cast<ssize_t>(total);  // the next call reports the end again
      failed_ = got == 0 ? ECONNRESET : errno;
    }
    if (total > 0) return static_cast<ssize_t>(total);  // returns the intact bytes; the next call fails
    errno = failed_;
    return -1;
  }
}

bool SealedStream::open_record() {
  if (failed_ != 0 || in_end_ - in_begin_ < kHeaderBytes) return false;
  uint32_t payload = 0;
  std::memcpy(&payload, in_.data() + in_begin_, sizeof(payload));
  const size_t whole = kHeaderBytes + size_t{payload} + crypto::kTagBytes;
  if (payload == 0 || payload > kMostPayload) {
    failed_ = EBADMSG;
    return false;
  }
  if (in_end_ - in_begin_ < whole) return false;
  std::byte* const header = in_.data() + in_begin_;
  if (!opener_.open({header, kHeaderBytes}, {header + kHeaderBytes, payload}, header + kHeaderBytes + payload)) {
    failed_ = EBADMSG;
    return false;
  }
  plain_begin_ = in_begin_ + kHeaderBytes;
  plain_end_ = plain_begin_ + payload;
  in_begin_ += whole;
  return true;
}

size_t SealedStream::deliver(const iovec* pieces, size_t count, size_t& piece, size_t& inside) {
  size_t total = 0;
  while (piece < count) {
    const size_t size = std::min(pieces[piece].iov_len - inside, plain_end_ - plain_begin_);
    if (size > 0) {
      std::memcpy(static_cast<std::byte*>(pieces[piece].iov_base) + inside, in_.data() + plain_begin_, size);
    }
    total += size;
    inside += size;
    plain_begin_ += size;
    if (inside < pieces[piece].iov_len) break;
    ++piece;
    inside = 0;
  }
  return total;
}

}  // namespace horovod::wire
