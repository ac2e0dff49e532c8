// A stand-in for the part of NVIDIA's driver that the engine calls, for hosts without a GPU: device memory is memory of
// this process, a stream is a thread with a queue, an event is a count. Work runs in the order that CUDA promises and
// in no other: streams know nothing of each other but by events. Handles are checked, so a use after destruction is an
// error.
//
// What tests need beside: faults (STANDIN_CUDA_FAIL, standin_cuda_fail), counts of what is alive, and holds that stop a
// stream until they are released.
#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "cuda_parts.h"
#include "faults.h"

using namespace standin;

namespace {

constexpr int kVersion = 12040;
constexpr size_t kDeviceBytes = size_t{8} << 30;

class Queue {
 public:
  Queue(int device) : device(device) {}

  void start(const std::shared_ptr<Queue>& self) {
    std::thread([self] { self->work(); }).detach();
  }
  void push(std::function<void()> task) {
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

// Records are numbered; `passed` is the number of the last one that its stream has come to.
struct Event {
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t recorded = 0, passed = 0;
  int device = 0;
};

struct Block {
  size_t bytes = 0;
  int device = 0;
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
  std::map<void*, std::shared_ptr<Hold>> holds;
  std::map<uintptr_t, size_t> pinned;  // bytes by address
  size_t most_pinned = 0;              // so many at once
  size_t used_bytes = 0;
  std::vector<Copy> copies;  // as they were queued, since recording began
  bool recording = false;
  standin::Faults faults{"STANDIN_CUDA_FAIL"};

  World() {
    const char* count = std::getenv("STANDIN_CUDA_DEVICES");
    for (int i = 0; i < (count ? std::atoi(count) : 8); ++i) {
      devices.push_back(std::make_unique<Device>());
      devices.back()->ordinal = i;
    }
  }
};

World& world() {
  static World* const made = new World();
  return *made;
}

thread_local std::vector<Device*> t_contexts;

Device* current() { return t_contexts.empty() ? nullptr : t_contexts.back(); }

// With the world's mutex held. Null for a handle that is none.
std::shared_ptr<Queue> stream_of(void* handle) {
  if (handle && handle != reinterpret_cast<void*>(1)) {
    const auto found = world().streams.find(handle);
    return found == world().streams.end() ? nullptr : found->second;
  }
  Device* device = current();
  if (!device) return nullptr;
  if (!device->legacy) {
    device->legacy = std::make_shared<Queue>(device->ordinal);
    device->legacy->start(device->legacy);
  }
  return device->legacy;
}

}  // namespace

#define ENTER(name)                                                    \
  if (const int fault = world().faults.due(name); fault) return fault; \
  const std::lock_guard<std::mutex> lock(world().mutex);               \
  if (!world().initialized) return kNotInitialized

EXPORTED int cuInit(unsigned) {
  if (const int fault = world().faults.due("cuInit"); fault) return fault;
  const std::lock_guard<std::mutex> lock(world().mutex);
  if (world().devices.empty()) return kNoDevice;
  world().initialized = true;
  return kSuccess;
}

EXPORTED int cuDriverGetVersion(int* version) {
  const char* text = std::getenv("STANDIN_CUDA_VERSION");
  *version = text ? std::atoi(text) : kVersion;
  return kSuccess;
}

EXPORTED int cuGetErrorName(int result, const char** name) {
  static const std::map<int, const char*> names = {
      {kInvalidValue, "CUDA_ERROR_INVALID_VALUE"},
      {kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY"},
      {kNotInitialized, "CUDA_ERROR_NOT_INITIALIZED"},
      {kNoDevice, "CUDA_ERROR_NO_DEVICE"},
      {kInvalidDevice, "CUDA_ERROR_INVALID_DEVICE"},
      {kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT"},
      {kNoBinaryForGpu, "CUDA_ERROR_NO_BINARY_FOR_GPU"},
      {kInvalidHandle, "CUDA_ERROR_INVALID_HANDLE"},
      {kNotFound, "CUDA_ERROR_NOT_FOUND"},
      {kNotReady, "CUDA_ERROR_NOT_READY"},
      {kIllegalAddress, "CUDA_ERROR_ILLEGAL_ADDRESS"},
      {719, "CUDA_ERROR_LAUNCH_FAILED"},
  };
  const auto found = names.find(result);
  *name = found == names.end() ? nullptr : found->second;
  return *name ? kSuccess : kInvalidValue;
}

EXPORTED int cuGetErrorString(int result, const char** text) {
  *text = "said by the stand-in";
  return result == kSuccess ? kInvalidValue : kSuccess;
}

EXPORTED int cuDeviceGetCount(int* count) {
  ENTER("cuDeviceGetCount");
  *count = static_cast<int>(world().devices.size());
  return kSuccess;
}

EXPORTED int cuDeviceGet(int* device, int ordinal) {
  ENTER("cuDeviceGet");
  if (ordinal < 0 || ordinal >= static_cast<int>(world().devices.size())) return kInvalidDevice;
  *device = ordinal;
  return kSuccess;
}

EXPORTED int cuDeviceGetAttribute(int* value, int attribute, int device) {
  ENTER("cuDeviceGetAttribute");
  if (device < 0 || device >= static_cast<int>(world().devices.size())) return kInvalidDevice;
  if (attribute != 75 && attribute != 76) return kInvalidValue;  // the compute capability is all that is asked for
  const char* text = std::getenv("STANDIN_CUDA_CAPABILITY");
  const int capability = text ? std::atoi(text) : kCapability;
  *value = attribute == 75 ? capability / 10 : capability % 10;
  return kSuccess;
}

EXPORTED int cuDevicePrimaryCtxRetain(Device** context, int device) {
  ENTER("cuDevicePrimaryCtxRetain");
  *context = world().devices[device].get();
  ++(*context)->retained;
  return kSuccess;
}

EXPORTED int cuDevicePrimaryCtxRelease_v2(int device) {
  ENTER("cuDevicePrimaryCtxRelease_v2");
  if (world().devices[device]->retained == 0) return kInvalidContext;
  --world().devices[device]->retained;
  return kSuccess;
}

EXPORTED int cuCtxPushCurrent_v2(Device* context) {
  ENTER("cuCtxPushCurrent_v2");
  if (!context || context->retained == 0) return kInvalidContext;
  t_contexts.push_back(context);
  return kSuccess;
}

EXPORTED int cuCtxPopCurrent_v2(Device** context) {
  if (t_contexts.empty()) return kInvalidContext;
  *context = t_contexts.back();
  t_contexts.pop_back();
  return kSuccess;
}

EXPORTED int cuCtxGetDevice(int* device) {
  if (!current()) return kInvalidContext;
  *device = current()->ordinal;
  return kSuccess;
}

EXPORTED int cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  ENTER("cuCtxGetStreamPriorityRange");
  *least = 0;
  *greatest = -5;
  return current() ? kSuccess : kInvalidContext;
}

EXPORTED int cuStreamCreateWithPriority(void** stream, unsigned flags, int priority) {
  ENTER("cuStreamCreateWithPriority");
  if (!current()) return kInvalidContext;
  if (flags > 1 || priority > 0 || priority < -5) return kInvalidValue;
  const auto made = std::make_shared<Queue>(current()->ordinal);
  made->start(made);
  world().streams.emplace(made.get(), made);
  *stream = made.get();
  return kSuccess;
}

EXPORTED int cuStreamDestroy_v2(void* stream) {
  ENTER("cuStreamDestroy_v2");
  const auto found = world().streams.find(stream);
  if (found == world().streams.end()) return kInvalidHandle;
  found->second->finish();
  world().streams.erase(found);
  return kSuccess;
}

EXPORTED int cuLaunchHostFunc(void* stream, void (*function)(void*), void* data) {
  ENTER("cuLaunchHostFunc");
  const std::shared_ptr<Queue> queue = stream_of(stream);
  if (!queue) return kInvalidHandle;
  queue->push([=] { function(data); });
  return kSuccess;
}

EXPORTED int cuStreamSynchronize(void* stream) {
  struct Done {
    std::mutex mutex;
    std::condition_variable changed;
    bool yes = false;
  };
  const auto done = std::make_shared<Done>();
  {
    ENTER("cuStreamSynchronize");
    const std::shared_ptr<Queue> queue = stream_of(stream);
    if (!queue) return kInvalidHandle;
    queue->push([done] {
      const std::lock_guard<std::mutex> told(done->mutex);
      done->yes = true;
      done->changed.notify_all();
    });
  }
  std::unique_lock<std::mutex> wait(done->mutex);
  done->changed.wait(wait, [&] { return done->yes; });
  return kSuccess;
}

EXPORTED int cuEventCreate(void** event, unsigned flags) {
  ENTER("cuEventCreate");
  if (!current()) return kInvalidContext;
  if (flags != 2) return kInvalidValue;  // events of the engine have no timing
  const auto made = std::make_shared<Event>();
  made->device = current()->ordinal;
  world().events.emplace(made.get(), made);
  *event = made.get();
  return kSuccess;
}

EXPORTED int cuEventDestroy_v2(void* event) {
  ENTER("cuEventDestroy_v2");
  return world().events.erase(event) == 1 ? kSuccess : kInvalidHandle;
}

EXPORTED int cuEventRecord(void* event, void* stream) {
  ENTER("cuEventRecord");
  const auto found = world().events.find(event);
  const std::shared_ptr<Queue> queue = stream_of(stream);
  if (!current()) return kInvalidContext;
  if (found == world().events.end() || !queue || found->second->device != queue->device) return kInvalidHandle;
  const std::shared_ptr<Event> made = found->second;
  uint64_t number;
  {
    const std::lock_guard<std::mutex> counting(made->mutex);
    number = ++made->recorded;
  }
  queue->push([made, number] {
    const std::lock_guard<std::mutex> counting(made->mutex);
    made->passed = number;
    made->changed.notify_all();
  });
  return kSuccess;
}

EXPORTED int cuEventQuery(void* event) {
  ENTER("cuEventQuery");
  const auto found = world().events.find(event);
  if (found == world().events.end()) return kInvalidHandle;
  const std::lock_guard<std::mutex> counting(found->second->mutex);
  return found->second->passed == found->second->recorded ? kSuccess : kNotReady;
}

EXPORTED int cuStreamWaitEvent(void* stream, void* event, unsigned flags) {
  ENTER("cuStreamWaitEvent");
  const auto found = world().events.find(event);
  const std::shared_ptr<Queue> queue = stream_of(stream);
  if (found == world().events.end() || !queue || flags != 0) return kInvalidHandle;
  const std::shared_ptr<Event> waited = found->second;
  uint64_t number;
  {
    const std::lock_guard<std::mutex> counting(waited->mutex);
    number = waited->recorded;  // what is recorded later does not matter
  }
  queue->push([waited, number] {
    std::unique_lock<std::mutex> wait(waited->mutex);
    waited->changed.wait(wait, [&] { return waited->passed >= number; });
  });
  return kSuccess;
}

EXPORTED int cuMemAllocAsync(uintptr_t* address, size_t bytes, void* stream) {
  ENTER("cuMemAllocAsync");
  const std::shared_ptr<Queue> queue = stream_of(stream);
  if (!queue) return kInvalidHandle;
  if (bytes == 0) return kInvalidValue;
  if (world().used_bytes + bytes > kDeviceBytes) return kOutOfMemory;
  void* memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  if (!memory) return kOutOfMemory;
  std::memset(memory, 0xa5, bytes);  // what was there before
  *address = reinterpret_cast<uintptr_t>(memory);
  world().blocks[*address] = {bytes, queue->device};
  world().used_bytes += bytes;
  return kSuccess;
}

EXPORTED int cuMemFreeAsync(uintptr_t address, void* stream) {
  ENTER("cuMemFreeAsync");
  const auto found = world().blocks.find(address);
  const std::shared_ptr<Queue> queue = stream_of(stream);
  if (found == world().blocks.end()) return kInvalidValue;
  if (!queue) return kInvalidHandle;
  queue->push([address] {
    const std::lock_guard<std::mutex> freeing(world().mutex);
    const auto block = world().blocks.find(address);
    if (block == world().blocks.end()) std::abort();  // freed twice
    std::memset(reinterpret_cast<void*>(address), 0xee, block->second.bytes);
    world().used_bytes -= block->second.bytes;
    world().blocks.erase(block);
    std::free(reinterpret_cast<void*>(address));
  });
  return kSuccess;
}

EXPORTED int cuMemsetD8Async(uintptr_t address, unsigned char value, size_t bytes, void* stream) {
  ENTER("cuMemsetD8Async");
  const std::shared_ptr<Queue> queue = stream_of(stream);
  if (!queue) return kInvalidHandle;
  queue->push([=] { std::memset(reinterpret_cast<void*>(address), value, bytes); });
  return kSuccess;
}

EXPORTED int cuMemcpyAsync(uintptr_t to, uintptr_t from, size_t bytes, void* stream) {
  ENTER("cuMemcpyAsync");
  const std::shared_ptr<Queue> queue = stream_of(stream);
  if (!queue) return kInvalidHandle;
  queue->push([=] { std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes); });
  return kSuccess;
}

EXPORTED int cuMemHostAlloc(void** memory, size_t bytes, unsigned flags) {
  ENTER("cuMemHostAlloc");
  if (!current()) return kInvalidContext;
  if (bytes == 0 || flags != 1) return kInvalidValue;
  *memory = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  if (!*memory) return kOutOfMemory;
  std::memset(*memory, 0x5a, bytes);
  world().pinned[reinterpret_cast<uintptr_t>(*memory)] = bytes;
  if (world().pinned.size() > world().most_pinned) world().most_pinned = world().pinned.size();
  return kSuccess;
}

EXPORTED int cuMemFreeHost(void* memory) {
  ENTER("cuMemFreeHost");
  const auto found = world().pinned.find(reinterpret_cast<uintptr_t>(memory));
  if (found == world().pinned.end()) return kInvalidValue;
  std::memset(memory, 0xee, found->second);
  std::free(memory);
  world().pinned.erase(found);
  return kSuccess;
}

namespace {

// With the world's mutex held: a copy whose memory is what it should be.
int queue_copy(uintptr_t device, uintptr_t host, size_t bytes, void* stream, bool to_host) {
  const std::shared_ptr<Queue> queue = stream_of(stream);
  if (!queue) return kInvalidHandle;
  auto block = world().blocks.upper_bound(device);
  auto pinned = world().pinned.upper_bound(host);
  if (block == world().blocks.begin() || pinned == world().pinned.begin()) return kInvalidValue;
  --block;
  --pinned;
  if (device + bytes > block->first + block->second.bytes || block->second.device != queue->device) {
    return kInvalidValue;
  }
  if (host + bytes > pinned->first + pinned->second) return kInvalidValue;
  if (world().recording) {
    world().copies.push_back({queue->device, to_host, static_cast<int64_t>(device), static_cast<int64_t>(bytes)});
  }
  queue->push([=] {
    std::memcpy(reinterpret_cast<void*>(to_host ? host : device), reinterpret_cast<void*>(to_host ? device : host),
                bytes);
  });
  return kSuccess;
}

}  // namespace

EXPORTED int cuMemcpyDtoHAsync_v2(void* to, uintptr_t from, size_t bytes, void* stream) {
  ENTER("cuMemcpyDtoHAsync_v2");
  return queue_copy(from, reinterpret_cast<uintptr_t>(to), bytes, stream, true);
}

EXPORTED int cuMemcpyHtoDAsync_v2(uintptr_t to, const void* from, size_t bytes, void* stream) {
  ENTER("cuMemcpyHtoDAsync_v2");
  return queue_copy(to, reinterpret_cast<uintptr_t>(from), bytes, stream, false);
}
int standin::fault_of(const char* function) { return world().faults.due(function); }

// -- for tests and for the stand-in of NCCL ---------------------------------------------------------------------------

EXPORTED void standin_cuda_fail(const char* function, int code, int skip) { world().faults.plan(function, code, skip); }

EXPORTED int64_t standin_cuda_count(const char* what) {
  const std::lock_guard<std::mutex> lock(world().mutex);
  const std::string name = what;
  if (name == "streams") return static_cast<int64_t>(world().streams.size());
  if (name == "events") return static_cast<int64_t>(world().events.size());
  if (name == "blocks") return static_cast<int64_t>(world().blocks.size());
  if (name == "pinned") return static_cast<int64_t>(world().pinned.size());
  if (name == "most_pinned") return static_cast<int64_t>(world().most_pinned);
  if (const int64_t number = count_of_modules(name); number >= 0) return number;
  if (name != "contexts") return -1;
  int64_t retained = 0;
  for (const auto& device : world().devices) retained += device->retained;
  return retained;
}

// Begins to record copies between devices and pinned memory, from none.
EXPORTED void standin_cuda_record() {
  const std::lock_guard<std::mutex> lock(world().mutex);
  world().copies.clear();
  world().recording = true;
}

// What was recorded since, four numbers each (see Copy), up to `most` of them; gives how many there are.
EXPORTED int64_t standin_cuda_recorded(int64_t* numbers, int64_t most) {
  const std::lock_guard<std::mutex> lock(world().mutex);
  world().recording = false;
  const auto count = static_cast<int64_t>(world().copies.size());
  if (count > 0) std::memcpy(numbers, world().copies.data(), sizeof(Copy) * std::min(most, count));
  return count;
}

// Stops a stream where it is now. The answer is what to release.
EXPORTED void* standin_cuda_hold(void* stream) {
  const auto hold = std::make_shared<Hold>();
  const std::lock_guard<std::mutex> lock(world().mutex);
  const std::shared_ptr<Queue> queue = stream_of(stream);
  if (!queue) return nullptr;
  world().holds.emplace(hold.get(), hold);
  queue->push([hold] {
    std::unique_lock<std::mutex> wait(hold->mutex);
    hold->changed.wait(wait, [&] { return hold->released; });
  });
  return hold.get();
}

EXPORTED void standin_cuda_release(void* handle) {
  const std::lock_guard<std::mutex> lock(world().mutex);
  const auto found = world().holds.find(handle);
  if (found == world().holds.end()) return;
  const std::lock_guard<std::mutex> release(found->second->mutex);
  found->second->released = true;
  found->second->changed.notify_all();
  world().holds.erase(found);
}

// Whether [address, address + bytes) is memory of the device.
EXPORTED int standin_cuda_holds(const void* address, size_t bytes, int device) {
  const std::lock_guard<std::mutex> lock(world().mutex);
  const auto begin = reinterpret_cast<uintptr_t>(address);
  auto found = world().blocks.upper_bound(begin);
  if (found == world().blocks.begin()) return 0;
  --found;
  return found->second.device == device && begin + bytes <= found->first + found->second.bytes;
}

EXPORTED int standin_cuda_device_of(void* stream) {
  const std::lock_guard<std::mutex> lock(world().mutex);
  const std::shared_ptr<Queue> queue = stream_of(stream);
  return queue ? queue->device : -1;
}
