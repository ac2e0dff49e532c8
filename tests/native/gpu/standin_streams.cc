// The part of the driver's stand-in with streams and events, and with holds that stop a stream until they are released.
#include <utility>

#include "cuda_world.h"

using namespace standin;

namespace {

thread_local int t_mode = kGlobal;  // what this thread says of its calls while something is captured

}  // namespace

// With the world's mutex held. As the driver's reference says of cuThreadExchangeStreamCaptureMode.
int standin::allow_unsafe_call() {
  if (t_mode == kRelaxed) return kSuccess;
  int result = kSuccess;
  for (const auto& [handle, queue] : world().streams) {
    Capture& capture = queue->capture;
    const bool own = capture.thread == std::this_thread::get_id() && capture.mode != kRelaxed;
    if (capture.state == Capture::none || !(own || (t_mode == kGlobal && capture.mode == kGlobal))) continue;
    capture.state = Capture::invalidated;
    result = kCaptureUnsupported;
  }
  return result;
}

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
  *greatest = kGreatestPriority;
  return current() ? kSuccess : kInvalidContext;
}

EXPORTED int cuStreamCreateWithPriority(void** stream, unsigned flags, int priority) {
  ENTER("cuStreamCreateWithPriority");
  if (!current()) return kInvalidContext;
  if (flags > 1 || priority > 0 || priority < kGreatestPriority) return kInvalidValue;
  const auto made = std::make_shared<Queue>(current()->ordinal, priority);
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
    if (const int refused = allow_unsafe_call(); refused) return refused;
    const std::shared_ptr<Queue> queue = stream_of(stream);
    if (!queue) return kInvalidHandle;
    if (queue->capture.state != Capture::none) return kCaptureUnsupported;
    release_idle_memory();
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

EXPORTED int cuStreamBeginCapture_v2(void* stream, int mode) {
  ENTER("cuStreamBeginCapture_v2");
  const std::shared_ptr<Queue> queue = stream_of(stream);
  if (!queue || !stream || mode < kGlobal || mode > kRelaxed) return kInvalidValue;
  if (queue->capture.state != Capture::none) return kInvalidValue;
  queue->capture = {Capture::active, mode, std::this_thread::get_id()};
  return kSuccess;
}

EXPORTED int cuStreamEndCapture(void* stream, void** graph) {
  ENTER("cuStreamEndCapture");
  const std::shared_ptr<Queue> queue = stream_of(stream);
  if (!queue) return kInvalidHandle;
  *graph = nullptr;  // nobody runs it
  const Capture::State state = std::exchange(queue->capture, {}).state;
  return state == Capture::active ? kSuccess : state == Capture::none ? kCaptureUnmatched : kCaptureInvalidated;
}

EXPORTED int cuStreamIsCapturing(void* stream, int* state) {
  ENTER("cuStreamIsCapturing");
  const std::shared_ptr<Queue> queue = stream_of(stream);
  if (!queue) return kInvalidHandle;
  *state = queue->capture.state;
  return kSuccess;
}

EXPORTED int cuThreadExchangeStreamCaptureMode(int* mode) {
  if (*mode < kGlobal || *mode > kRelaxed) return kInvalidValue;
  std::swap(t_mode, *mode);
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
  const auto record = std::make_shared<Record>();
  found->second->last = record;
  found->second->captured = queue->capture.state != Capture::none;
  queue->push([record] {
    const std::lock_guard<std::mutex> telling(record->mutex);
    record->passed = true;
    record->changed.notify_all();
  });
  return kSuccess;
}

EXPORTED int cuEventQuery(void* event) {
  ENTER("cuEventQuery");
  const auto found = world().events.find(event);
  if (found == world().events.end()) return kInvalidHandle;
  if (const int refused = allow_unsafe_call(); refused) return refused;
  if (found->second->captured) return kCaptureUnsupported;
  ++world().queries;
  const std::shared_ptr<Record> last = found->second->last;
  if (!last) return kSuccess;
  const std::lock_guard<std::mutex> asking(last->mutex);
  return last->passed ? kSuccess : kNotReady;
}

EXPORTED int cuStreamWaitEvent(void* stream, void* event, unsigned flags) {
  ENTER("cuStreamWaitEvent");
  ++world().waits;
  const auto found = world().events.find(event);
  const std::shared_ptr<Queue> queue = stream_of(stream);
  if (found == world().events.end() || !queue || flags != 0) return kInvalidHandle;
  const std::shared_ptr<Event> waited = found->second;
  if (queue->capture.state != Capture::none && !waited->captured) {
    queue->capture.state = Capture::invalidated;
    return kCaptureIsolation;
  }
  if (!waited->last) return kSuccess;
  queue->push([last = waited->last] {  // what is recorded later does not matter
    std::unique_lock<std::mutex> wait(last->mutex);
    last->changed.wait(wait, [&] { return last->passed; });
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
