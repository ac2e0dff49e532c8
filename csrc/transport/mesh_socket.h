// A descriptor of the data plane: closed when its owner goes, on exec, and in every forked child.
//
// Why the last: a child that a training script forks (a data loader, a subprocess before its exec) would keep the
// connection open after its parent died, and the peers would wait for a rank that is gone.
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

  int fd() const { return forks_ == forks.load(std::memory_order_relaxed) ? fd_ : -1; }

 private:
  void close();

  inline static std::atomic<uint64_t> forks{0};  // how often this line of processes has forked since it has sockets

  int fd_ = -1;
  uint64_t forks_ = 0;  // when fd_ was opened

  friend struct Registry;
};

// Non-blocking, close-on-exec, no delay for small frames, keep-alive probes. False with errno set when the descriptor
// is no socket that can do so.
bool prepare_stream(int fd, int64_t unreachable_ms = 20'000);

// For how long the other side's kernel has owed an acknowledgement of what was sent; 0 when it owes none. One whose
// process is stopped still answers, so this is about hosts and networks.
int64_t unanswered_ms(int fd);

}  // namespace horovod::wire
