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

// What the kernel knows of the other side's host.
struct Answers {
  bool owed = false;       // something was sent, be it only a question whether it lives, that is not acknowledged yet
  bool certainly = false;  // and not just the latest of several questions
  int64_t last_ms = 0;     // since anything was acknowledged
  int64_t asked_ms = 0;    // since it was last sent what it owes an answer to; 0: not known
  uint64_t acknowledged = 0;  // bytes so far
};
Answers answers_of(int fd);  // none are owed where it is no TCP connection

// For how long the other side's kernel has owed an acknowledgement of what was sent. A process that is stopped has a
// kernel that answers, so this is about hosts and networks.
//
// The time since the last acknowledgement is not that. While nothing is sent none is owed, and a pause of many seconds
// may lie before the first byte that gets no answer. And a kernel that gets none waits twice as long each time before
// it sends again, so a network may have been whole for long before anybody notices: what counts ends when it was last
// asked.
class Silence {
 public:
  // To be asked now and then; 0 when nothing is owed, or what was sent last may still be answered.
  int64_t owed_ms(const Answers& answers, int64_t now_ms);

 private:
  int64_t since_ms_ = 0;  // when the debt was first seen
  bool owed_ = false;
  uint64_t acknowledged_ = 0;  // then
};

}  // namespace horovod::wire
