// What the parts of NCCL's stand-in share: communicators, and the calls that are made on them.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "faults.h"
#include "hub.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

extern "C" {
int cuCtxGetDevice(int* device);
int cuLaunchHostFunc(void* stream, void (*function)(void*), void* data);
int standin_cuda_holds(const void* address, size_t bytes, int device);
int standin_cuda_device_of(void* stream);
}

namespace standin::nccl {

enum Result : int {
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7
};

struct UniqueId {
  char bytes[128];
};

struct Config {
  size_t size;
  unsigned magic, version;
  int blocking;
};

struct Comm;

struct Call {
  Comm* comm = nullptr;
  Header header;
  const void* input = nullptr;
  void* output = nullptr;
  void* stream = nullptr;
  std::vector<char> factor;  // of each element before it is reduced
};

struct Comm {
  int rank = 0, ranks = 0, device = -1;
  bool blocking = true;
  std::string hub;
  int socket = -1;
  const int wake = ::eventfd(0, EFD_CLOEXEC);  // set by an abort
  std::atomic<int> state{kSuccess};            // what ncclCommGetAsyncError answers
  std::mutex mutex;                            // guards everything below
  std::condition_variable changed;
  std::string last_error;
  int queued = 0;  // tasks on streams
  bool finalized = false;
  std::thread worker;
  struct Factor {
    int type = 0;
    std::vector<char> value;
  };
  std::map<int, Factor> factors;  // by number of the operation
  int next_op = 5;

  ~Comm() {
    if (socket >= 0) ::close(socket);
    ::close(wake);
  }
  std::atomic<bool> aborted{false};  // before `wake` is set; stays
  void abort() {
    aborted.store(true, std::memory_order_release);
    const uint64_t one = 1;
    (void)!::write(wake, &one, sizeof one);
  }

  void fail(int result, const std::string& sentence) {
    const std::lock_guard<std::mutex> lock(mutex);
    last_error = sentence;
    state.store(result, std::memory_order_release);
  }
};

struct Counts {
  std::atomic<int64_t> comms{0}, ops{0}, groups{0}, aborts{0};
};
extern Counts g_counts;
extern std::atomic<bool> g_remote_errors;
extern standin::Faults g_faults;

#define FAULT(name) \
  if (const int fault = g_faults.due(name); fault) return fault

bool alive(Comm* comm);

// Does the work at once or, where the host must not block, on a thread. Not after a failure.
int perform(Comm& comm, const std::function<void()>& work);
// Puts what a group has of one communicator on the streams.
void launch(Comm& comm, const std::vector<Call>& calls);

}  // namespace standin::nccl
