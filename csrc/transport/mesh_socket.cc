#include "transport/mesh_socket.h"

#include <algorithm>
#include <cerrno>
#include <mutex>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

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

void Socket::close() {
  if (fd_ < 0) return;
  const std::lock_guard<std::mutex> lock(Registry::get().mutex);
  if (fd() >= 0) {  // otherwise the number may by now belong to another descriptor
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
  // The rest makes TCP fast and dead hosts visible; a socket pair knows none of it and needs none.
  const auto set = [fd](int level, int option, int value) {
    (void)setsockopt(fd, level, option, &value, sizeof(value));
  };
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  // While nothing is under way the kernel asks: half of the time for silence, then five probes. While something is, it
  // would try for a quarter of an hour; TCP_USER_TIMEOUT would end that, but also wait no longer for a process that is
  // stopped and takes nothing. Hence unanswered_ms().
  const auto seconds = [](int64_t ms) { return static_cast<int>(std::clamp<int64_t>(ms / 1000, 1, 32'767)); };
  set(IPPROTO_TCP, TCP_KEEPIDLE, seconds(unreachable_ms / 2));
  set(IPPROTO_TCP, TCP_KEEPINTVL, seconds(unreachable_ms / 10));
  set(IPPROTO_TCP, TCP_KEEPCNT, 5);
  return true;
}

int64_t unanswered_ms(int fd) {
  tcp_info info{};
  socklen_t length = sizeof(info);
  if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) < 0) return 0;  // no TCP
  // A live connection has had an acknowledgement within the keepalive's time when it begins to owe the next. The window
  // of a process that takes nothing is probed ever more seldom, so there one question alone says nothing.
  return info.tcpi_unacked > 0 || info.tcpi_probes > 1 ? info.tcpi_last_ack_recv : 0;
}

}  // namespace horovod::wire
