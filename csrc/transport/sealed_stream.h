// A byte stream over a socket whose bytes are sealed: what the reader gets is what the writer gave, in order and whole,
// or nothing more. Stands in for sendmsg() and recvmsg() of a connection; never blocks.
//
// On the socket lie records: u32 length of the payload, the payload (encrypted, or as it is), a tag of 16 bytes. The
// record's number is in no record: a record that was left out, repeated or moved does not fit its place.
//
// Threads: one writer and one reader at a time, which share nothing.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "transport/crypto.h"

namespace horovod::wire {

// Of one connection, as this end sees it.
struct Keys {
  crypto::Key send{};
  crypto::Key receive{};
};

class SealedStream {
 public:
  static constexpr size_t kMostPayload = 64u << 10;  // of a record

  SealedStream(const crypto::Library& library, const Keys& keys, bool hides,
               uint64_t records_per_key = crypto::Aead::kRecordsPerKey);

  // As sendmsg(): how many bytes it took, or -1 with errno. Took means sealed; waits() tells whether some of it is
  // still to be sent, by flush() or by the next call, which takes nothing before that.
  ssize_t send(int fd, const iovec* pieces, size_t count);
  bool waits() const { return sent_ < out_.size(); }
  // Sends what waits; false with errno (EAGAIN: not all of it yet).
  bool flush(int fd);

  // As recvmsg(), but it returns less than was asked for only when the socket has no more, or ends. -1 with EBADMSG:
  // what came is not what was sent; with ECONNRESET the stream ended in the middle of a record. Both for ever.
  ssize_t receive(int fd, const iovec* pieces, size_t count);
  uint64_t received_records() const { return opener_.records(); }

 private:
  static constexpr size_t kHeaderBytes = 4;
  static constexpr size_t kMostSealed = 4 * kMostPayload;  // of one send(): reading and writing take turns

  bool open_record();  // false: there is none, or it is a forgery
  size_t deliver(const iovec* pieces, size_t count, size_t& piece, size_t& inside);

  crypto::Aead sealer_;
  std::vector<std::byte> out_;
  size_t sent_ = 0;

  crypto::Aead opener_;
  std::vector<std::byte> in_;  // from the socket: an opened record and what follows
  size_t in_begin_ = 0;        // where the next record begins
  size_t in_end_ = 0;
  size_t plain_begin_ = 0;  // what is left of the opened record
  size_t plain_end_ = 0;
  int failed_ = 0;  // errno
};

}  // namespace horovod::wire
