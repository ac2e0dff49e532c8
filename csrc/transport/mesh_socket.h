// A descriptor of the data plane: closed when its owner goes, on exec, and in every forked child.
//
// Why in forked children: a child that a training script forks (a data loader, a subprocess before its exec) would keep
// the connection open after its parent died, and the peers would wait for a rank that is gone.
//
// Invariant: in a child forked after the Socket was made, fd() is -1, and destroying the Socket is harmless.
#pragma once

#include <atomic>
#include <cstdint>

namespace horovod::wire {

class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd);  // takes ownership
  Socket(Socket&& other) noexcept;
  Socket& operator=(Socket&& other) noexcept;
  ~Socket();

  // The descriptor, which is the caller's from now on, also in forked children; -1 where there is none.
  int release();

  int fd() const { return forks_ == forks.load(std::memory_order_relaxed) ? fd_ : -1; }

 private:
  void close();

  inline static std::atomic<uint64_t> forks{0};  // how many forks this process is away from the first with sockets

  int fd_ = -1;
  uint64_t forks_ = 0;  // `forks` when fd_ was opened

  friend struct Registry;
};

// Makes the socket non-blocking and close-on-exec, turns off the delay for small frames, and turns on keep-alive
// probes. False, with errno set, when the descriptor is no socket that can do so.
bool prepare_stream(int fd, int64_t unreachable_ms = 20'000);

// What the kernel knows of the other side's host.
struct Answers {
  bool owed = false;          // something that was sent (data or a keep-alive probe) is not acknowledged yet
  bool certainly = false;     // more than the latest of several probes is not acknowledged
  int64_t last_ms = 0;        // time since the last acknowledgement
  int64_t asked_ms = 0;       // time since the latest packet was sent that is not acknowledged; 0: not known
  uint64_t acknowledged = 0;  // bytes that were acknowledged so far
};
Answers answers_of(int fd);  // owed is false if fd is not a TCP connection

// For how long the other side's kernel has owed an acknowledgement of what was sent. A process that is stopped has a
// kernel that answers, so this is about hosts and networks.
//
// This is not the time since the last acknowledgement. While nothing is sent no acknowledgement is owed, and a pause of
// many seconds may lie before the first byte that gets none. Also, a kernel doubles its wait before each
// retransmission, so a network may work again long before the next packet shows it. So the time ends when the latest
// packet was sent.
class Silence {
 public:
  // To be asked now and then; 0 when nothing is owed, or what was sent last may still be answered.
  int64_t owed_ms(const Answers& answers, int64_t now_ms);

 private:
  int64_t since_ms_ = 0;  // when the acknowledgement was first seen to be owed
  bool owed_ = false;
  uint64_t acknowledged_ = 0;  // how many bytes were acknowledged then
};

}  // namespace horovod::wire
