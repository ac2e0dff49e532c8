// What the driver's stand-in consists of: devices, streams, events and memory, in one world for the process.
//
// Work runs in the order that CUDA promises and in no other: streams know nothing of each other but by events.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "cuda_parts.h"
#include "faults.h"

namespace standin {

inline constexpr size_t kDeviceBytes = size_t{8} << 30;

// Of a stream whose work is captured into a graph.
struct Capture {
  enum State : int { none = 0, active = 1, invalidated = 2 };  // as the driver counts
  State state = none;
  int mode = 0;  // see kGlobal
  std::thread::id thread;
};
enum CaptureMode : int { kGlobal = 0, kThreadLocal = 1, kRelaxed = 2 };

constexpr int kGreatestPriority = -5;

class Queue {
 public:
  explicit Queue(int device, int priority = 0) : device(device), priority(priority) {}

  void start(const std::shared_ptr<Queue>& self) {
    std::thread([self] { self->work(); }).detach();
  }
  // With the world's mutex held, as for `capture`.
  void push(std::function<void()> task) {
    if (capture.state != Capture::none) return;  // it would run when the graph does
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    changed_.notify_one();
  }
  void finish() {  // what is queued is still worked off
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      finishing_ = true;
    }
    changed_.notify_one();
  }

  const int device;
  const int priority;  // the lower, the sooner
  Capture capture;

 private:
  void work() {
    for (;;) {
      std::function<void()> task;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return finishing_ || !tasks_.empty(); });
        if (tasks_.empty()) return;
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
      task();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool finishing_ = false;
};

// Each record is a point of its own: an event may be recorded again, on another stream, while an earlier record has
// not passed, and whoever waits for that one goes on doing so.
struct Record {
  std::mutex mutex;
  std::condition_variable changed;
  bool passed = false;
};

struct Event {
  std::shared_ptr<Record> last;  // null: none yet
  int device = 0;
  bool captured = false;  // its last record is part of a graph
};

// Memory that was asked for and given back stays with it, up to a threshold, until somebody synchronizes.
struct Pool {
  int device = 0;
  uint64_t threshold = 0;
  size_t used = 0, reserved = 0;  // bytes
  bool destroyed = false;         // it goes with the last block
};

struct Block {
  size_t bytes = 0;
  int device = 0;
  std::shared_ptr<Pool> pool;  // null: the device's own
};

struct Device {
  int ordinal = 0;
  int retained = 0;
  std::shared_ptr<Queue> legacy;  // the default stream, once it was used
};

struct Hold {
  std::mutex mutex;
  std::condition_variable changed;
  bool released = false;
};

// A copy between a device and pinned memory. For tests: plain numbers.
struct Copy {
  int64_t device = 0;
  int64_t to_host = 0;
  int64_t address = 0;  // of the device's memory
  int64_t bytes = 0;
};

// Never destroyed: threads of streams may outlive main().
struct World {
  std::mutex mutex;  // guards everything below
  bool initialized = false;
  std::vector<std::unique_ptr<Device>> devices;
  std::map<void*, std::shared_ptr<Queue>> streams;
  std::map<void*, std::shared_ptr<Event>> events;
  std::map<uintptr_t, Block> blocks;
  std::map<void*, std::shared_ptr<Pool>> pools;
  std::map<void*, std::shared_ptr<Hold>> holds;
  std::map<uintptr_t, size_t> pinned;  // bytes by address
  size_t most_pinned = 0;              // so many at once
  size_t used_bytes = 0;
  std::vector<Copy> copies;  // as they were queued, since recording began
  bool recording = false;
  int64_t queries = 0;  // of events, so far
  int64_t waits = 0;    // of streams for events, so far
  Faults faults{"STANDIN_CUDA_FAIL"};

  World() {
    const char* count = std::getenv("STANDIN_CUDA_DEVICES");
    for (int i = 0; i < (count ? std::atoi(count) : 8); ++i) {
      devices.push_back(std::make_unique<Device>());
      devices.back()->ordinal = i;
    }
  }
};

World& world();

// The device of the calling thread's current context; null: there is none.
Device* current();

// With the world's mutex held. Null for a handle that is none.
std::shared_ptr<Queue> stream_of(void* handle);

}  // namespace standin

#define ENTER(name)                                                    \
  if (const int fault = world().faults.due(name); fault) return fault; \
  const std::lock_guard<std::mutex> lock(world().mutex);               \
  if (!world().initialized) return kNotInitialized
