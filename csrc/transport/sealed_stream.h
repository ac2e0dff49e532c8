// A byte stream over a socket whose bytes are sealed: the reader gets the writer's bytes in order and unchanged, and
// gets none after the first that is missing or forged. It takes the place of a connection's sendmsg() and recvmsg(),
// and never blocks.
//
// The socket carries records: u32 length of the payload, the payload (encrypted, or as it is), a tag of 16 bytes. The
// tag depends on the number of the record, which is not sent: so a record that was left out, repeated or moved is
// noticed.
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

// The keys of one connection, as this end sees it.
struct Keys {
  crypto::Key send{};
  crypto::Key receive{};
};

class SealedStream {
 public:
  static constexpr size_t kMostPayload = 64u << 10;  // of a record

  SealedStream(const crypto::Library& library, const Keys& keys, bool hides,
               uint64_t records_per_key = crypto::Aead::kRecordsPerKey);

  // Like sendmsg(): returns how many bytes it took, or -1 with errno. They are sealed then, but some may still be
  // unsent (waits()): flush() or the next call sends them, which takes no other bytes before.
  ssize_t send(int fd, const iovec* pieces, size_t count);
  bool waits() const { return sent_ < out_.size(); }
  // Sends what waits; false with errno (EAGAIN: not all of it yet).
  bool flush(int fd);

  // Like recvmsg(), but it returns less than was asked for only when the socket has no more, or ends. -1 with EBADMSG:
  // what came is not what was sent. -1 with ECONNRESET: the stream ended in the middle of a record. All later calls
  // then answer the same.
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
  std::vector<std::byte> in_;  // bytes from the socket: an opened record and what follows it
  size_t in_begin_ = 0;        // where the next record begins
  size_t in_end_ = 0;
  size_t plain_begin_ = 0;  // where the rest of the opened record begins
  size_t plain_end_ = 0;
  int failed_ = 0;  // errno
};

}  // namespace horovod::wire
