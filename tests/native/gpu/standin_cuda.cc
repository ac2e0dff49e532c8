// A stand-in for the part of NVIDIA's driver that the engine calls, for hosts without a GPU: device memory is memory of
// this process, a stream is a thread with a queue, an event is a count. Work runs in the order that CUDA promises and
// in no other: streams know nothing of each other but by events. Handles are checked, so a use after destruction is an
// error.
//
// What tests need beside: faults (STANDIN_CUDA_FAIL, standin_cuda_fail), counts of what is alive, and holds that stop a
// stream until they are released.
//
// This file has devices and contexts; streams, memory and kernels are in those beside it.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda_world.h"

using namespace standin;

namespace {

constexpr int kVersion = 12040;

thread_local std::vector<Device*> t_contexts;

}  // namespace

World& standin::world() {
  static World* const made = new World();
  return *made;
}

Device* standin::current() { return t_contexts.empty() ? nullptr : t_contexts.back(); }

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
      {kCaptureUnsupported, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"},
      {kCaptureInvalidated, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"},
      {kCaptureUnmatched, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED"},
      {kCaptureIsolation, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION"},
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

int standin::fault_of(const char* function) { return world().faults.due(function); }

// -- for tests and for the stand-in of NCCL ---------------------------------------------------------------------------

EXPORTED void standin_cuda_fail(const char* function, int code, int skip) { world().faults.plan(function, code, skip); }

EXPORTED int64_t standin_cuda_count(const char* what) {
  const std::lock_guard<std::mutex> lock(world().mutex);
  const std::string name = what;
  if (name == "streams") return static_cast<int64_t>(world().streams.size());
  if (name == "urgent_streams") {
    return std::count_if(world().streams.begin(), world().streams.end(),
                         [](const auto& stream) { return stream.second->priority == kGreatestPriority; });
  }
  if (name == "waits") return world().waits;
  if (name == "events") return static_cast<int64_t>(world().events.size());
  if (name == "blocks") return static_cast<int64_t>(world().blocks.size());
  if (name == "pinned") return static_cast<int64_t>(world().pinned.size());
  if (name == "most_pinned") return static_cast<int64_t>(world().most_pinned);
  if (name == "pools") return static_cast<int64_t>(world().pools.size());
  if (name == "reserved") {
    int64_t bytes = 0;
    for (const auto& [handle, pool] : world().pools) bytes += static_cast<int64_t>(pool->reserved);
    return bytes;
  }
  if (name == "queries") return world().queries;
  if (const int64_t number = count_of_modules(name); number >= 0) return number;
  if (name != "contexts") return -1;
  int64_t retained = 0;
  for (const auto& device : world().devices) retained += device->retained;
  return retained;
}
