// Holds one thread of this process wherever it is, as a system call that does not return would: a handler of a signal
// that waits until the test lets it go. The thread must hold no lock that the test needs.
#pragma once

#include <dirent.h>
#include <semaphore.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "check.h"

namespace horovod::testing {

// Of the one that is held; a handler may use semaphores that way (sem_post(3)), and reads of a pipe.
inline sem_t held_now;
inline int let_go_pipe[2] = {-1, -1};

extern "C" inline void hold_this_thread(int) {
  const int before = errno;
  sem_post(&held_now);
  char byte;
  while (::read(let_go_pipe[0], &byte, 1) < 0 && errno == EINTR) {
  }
  errno = before;
}

// One at a time.
class StuckThread {
 public:
  // thread: its number in the kernel.
  explicit StuckThread(pid_t thread) {
    CHECK(::sem_init(&held_now, 0, 0) == 0 && ::pipe(let_go_pipe) == 0);
    struct sigaction action{};
    action.sa_handler = hold_this_thread;
    CHECK(::sigaction(SIGUSR2, &action, nullptr) == 0);
    CHECK(::syscall(SYS_tgkill, ::getpid(), thread, SIGUSR2) == 0);
    while (::sem_wait(&held_now) != 0) CHECK(errno == EINTR);
  }
  StuckThread(const StuckThread&) = delete;
  StuckThread& operator=(const StuckThread&) = delete;
  ~StuckThread() { let_go(); }

  void let_go() {
    if (std::exchange(gone_, true)) return;
    CHECK(::write(let_go_pipe[1], "x", 1) == 1);
  }

 private:
  bool gone_ = false;
};

// The kernel's numbers of the threads of this process with that name.
inline std::vector<pid_t> threads_named(const std::string& name) {
  std::vector<pid_t> found;
  DIR* const folder = ::opendir("/proc/self/task");
  CHECK(folder != nullptr);
  while (const dirent* const entry = ::readdir(folder)) {
    std::ifstream file("/proc/self/task/" + std::string(entry->d_name) + "/comm");
    std::string its_name;
    if (std::getline(file, its_name) && its_name == name) found.push_back(std::atoi(entry->d_name));
  }
  ::closedir(folder);
  return found;
}

inline bool has_thread(const std::string& name) { return !threads_named(name).empty(); }

inline pid_t thread_named(const std::string& name) {
  const std::vector<pid_t> found = threads_named(name);
  CHECK(found.size() == 1, "there are %zu threads %s", found.size(), name.c_str());
  return found[0];
}

// Whether it waits in the kernel.
inline bool is_asleep(pid_t thread) {
  std::ifstream file("/proc/self/task/" + std::to_string(thread) + "/stat");
  std::string line;
  std::getline(file, line);
  const size_t name_end = line.rfind(") ");
  return name_end != std::string::npos && line.compare(name_end + 2, 1, "S") == 0;
}

}  // namespace horovod::testing
