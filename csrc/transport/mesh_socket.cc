#include "transport/mesh_socket.h"

#include <algorithm>
#include <cerrno>
#include <mutex>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <linux/tcp.h>  // a newer tcp_info than that of netinet/tcp.h
#include <netinet/in.h>
#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/limits.h"

namespace horovod::wire {

// Every open descriptor of every mesh in this process. fork() holds the mutex from before to after the fork, so the
// child's copy of the list is whole; the child closes what it inherited and starts with an empty list. The registry is
// never destroyed, because a mesh may outlive static destructors.
struct Registry {
  std::mutex mutex;  // guards fds
  std::vector<int> fds;

  static Registry& get() {
    static Registry* const instance = [] {
      auto* made = new Registry;
      pthread_atfork([] { get().mutex.lock(); }, [] { get().mutex.unlock(); }, [] { get().close_all(); });
      return made;
    }();
    return *instance;
  }

  void close_all() {
    for (const int fd : fds) ::close(fd);
    fds.clear();
    Socket::forks.fetch_add(1);
    mutex.unlock();
  }
};

Socket::Socket(int fd) : fd_(fd) {
  if (fd_ < 0) return;
  const std::lock_guard<std::mutex> lock(Registry::get().mutex);
  Registry::get().fds.push_back(fd_);
  forks_ = forks.load();
}

Socket::Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)), forks_(other.forks_) {}

Socket& Socket::operator=(Socket&& other) noexcept {
  if (this != &other) {
    close();
    fd_ = std::exchange(other.fd_, -1);
    forks_ = other.forks_;
  }
  return *this;
}

Socket::~Socket() { close(); }

int Socket::release() {
  const std::lock_guard<std::mutex> lock(Registry::get().mutex);
  const int released = fd();
  if (released >= 0) std::erase(Registry::get().fds, fd_);
  fd_ = -1;
  return released;
}

void Socket::close() {
  if (fd_ < 0) return;
  const std::lock_guard<std::mutex> lock(Registry::get().mutex);
  if (fd() >= 0) {  // in a forked child the number may belong to another descriptor by now
    std::erase(Registry::get().fds, fd_);
    ::close(fd_);
  }
  fd_ = -1;
}

bool prepare_stream(int fd, int64_t unreachable_ms) {
  const int flags = fcntl(fd, F_GETFL);
  if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0 || fcntl(fd, F_SETFD, FD_CLOEXEC) < 0) return false;
  int type = 0;
  socklen_t length = sizeof(type);
  if (getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &length) < 0) return false;
  if (type != SOCK_STREAM) {
    errno = EPROTOTYPE;
    return false;
  }
  // The rest makes TCP fast and dead hosts visible. A socket pair has none of these options and needs none.
  const auto set = [fd](int level, int option, int value) {
    (void)setsockopt(fd, level, option, &value, sizeof(value));
  };
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  // While nothing is under way the kernel sends probes: the first after half of the limit, and then some more until the
  // limit has passed since the first one. While data is under way it would retry for a quarter of an hour.
  // TCP_USER_TIMEOUT would end that, but would also give up a process that is stopped and reads nothing. Hence Silence.
  constexpr int64_t kLongestS = 32'767;
  const int64_t limit_s = std::clamp<int64_t>((unreachable_ms + 999) / 1000, 1, 5 * kLongestS);
  const int64_t between_s = std::max<int64_t>(limit_s / 5, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, static_cast<int>(std::clamp<int64_t>(limit_s / 2, 1, kLongestS)));
  set(IPPROTO_TCP, TCP_KEEPINTVL, static_cast<int>(between_s));
  set(IPPROTO_TCP, TCP_KEEPCNT, static_cast<int>((limit_s + between_s - 1) / between_s));
  // The longest wait before a retransmission, where the kernel has the option (Linux 6.15): operations then go on soon
  // after a network works again.
  constexpr int kRtoMax = 44;  // TCP_RTO_MAX_MS, for older headers
  set(IPPROTO_TCP, kRtoMax, static_cast<int>(std::clamp<int64_t>(unreachable_ms / 10, 1'000, 120'000)));
  return true;
}

Answers answers_of(int fd) {
  tcp_info info{};
  socklen_t length = sizeof(info);
  if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) < 0) return {};  // not a TCP socket
  // The kernel probes the window of a process that reads nothing more and more rarely, so one unanswered probe says
  // nothing.
  const bool data = info.tcpi_unacked > 0;
  return {.owed = data || info.tcpi_probes > 0,
          .certainly = data || info.tcpi_probes > 1,
          .last_ms = info.tcpi_last_ack_recv,
          .asked_ms = data ? info.tcpi_last_data_sent : 0,
          .acknowledged = info.tcpi_bytes_acked};
}

int64_t Silence::owed_ms(const Answers& answers, int64_t now_ms) {
  const bool is_new = !owed_ || answers.acknowledged != acknowledged_;
  if (is_new) since_ms_ = now_ms;
  owed_ = answers.owed;
  acknowledged_ = answers.acknowledged;
  if (!answers.certainly || (answers.asked_ms > 0 && answers.asked_ms < limits::kAcknowledgedMs)) return 0;
  return std::max<int64_t>(0, std::min(answers.last_ms, now_ms - since_ms_) - answers.asked_ms);
}

}  // namespace horovod::wire
