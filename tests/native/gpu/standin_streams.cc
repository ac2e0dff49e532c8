// The part of the driver's stand-in with streams and events, and with holds that stop a stream until they are released.
#include <utility>

#include "cuda_world.h"

using namespace standin;

std::shared_ptr<Queue> standin::stream_of(void* handle) {
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

// -- for tests and for the stand-in of NCCL ---------------------------------------------------------------------------

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

EXPORTED int standin_cuda_device_of(void* stream) {
  const std::lock_guard<std::mutex> lock(world().mutex);
  const std::shared_ptr<Queue> queue = stream_of(stream);
  return queue ? queue->device : -1;
}
