// What tests of GPU code share: the stand-ins for the driver and for NCCL, and a stream of one rank's device.
#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "backends/cuda/device.h"
#include "backends/nccl/library.h"
#include "base/clock.h"
#include "check.h"

namespace horovod::testing {

inline const std::string kCudaFile = STANDIN_FOLDER "/libstandin_cuda.so";
inline const std::string kNcclFile = STANDIN_FOLDER "/libstandin_nccl.so";
inline const std::string kNvrtcFile = STANDIN_FOLDER "/libstandin_nvrtc.so";

inline const cuda::Driver& the_driver() {
  Status status;
  const cuda::Driver* found = cuda::driver(kCudaFile, status);
  CHECK_OK(status);
  return *found;
}

inline const nccl::Library& the_library() {
  Status status;
  const nccl::Library* found = nccl::library(kNcclFile, status);
  CHECK_OK(status);
  return *found;
}

// A function that a stand-in exports for tests, or one of the driver's that only tests call.
template <typename Function>
Function* standin(const char* name) {
  for (const std::string& file : {kCudaFile, kNcclFile, kNvrtcFile}) {
    if (void* found = dlsym(dlopen(file.c_str(), RTLD_NOW), name)) return reinterpret_cast<Function*>(found);
  }
  CHECK(false, "the stand-ins have no %s", name);
  return nullptr;
}

inline int64_t count(const char* library, const char* what) {
  return standin<int64_t(const char*)>((std::string("standin_") + library + "_count").c_str())(what);
}
inline void plan_fault(const char* library, const char* function, int code, int skip = 0) {
  standin<void(const char*, int, int)>((std::string("standin_") + library + "_fail").c_str())(function, code, skip);
}

// One GPU with a stream; values go there and come back without the host in between.
struct Gpu {
  explicit Gpu(int ordinal) {
    Status status;
    device = cuda::Device::open(the_driver(), ordinal, status);
    CHECK_OK(status);
    stream = device->create_stream(status);
    CHECK_OK(status);
  }
  explicit Gpu(std::shared_ptr<cuda::Device> shared) : device(std::move(shared)) {  // another stream of it
    Status status;
    stream = device->create_stream(status);
    CHECK_OK(status);
  }
  template <typename T>
  OutputBuffer make(const std::vector<T>& values) {
    OutputBuffer buffer;
    CHECK_OK(device->allocate(values.size() * sizeof(T), stream, buffer));
    synchronize();
    std::copy(values.begin(), values.end(), reinterpret_cast<T*>(buffer.data.get()));
    return buffer;
  }
  void synchronize() {
    const cuda::Device::Current current(*device);
    CHECK(standin<int(cuda::StreamHandle)>("cuStreamSynchronize")(stream->handle()) == 0);
  }
  std::shared_ptr<DeviceEvent> now() {
    std::shared_ptr<DeviceEvent> event;
    CHECK_OK(device->record(stream->handle(), event));
    return event;
  }
  // Stops the stream from here on.
  void* hold() {
    const cuda::Device::Current current(*device);
    return standin<void*(cuda::StreamHandle)>("standin_cuda_hold")(stream->handle());
  }
  static void release(void* held) { standin<void(void*)>("standin_cuda_release")(held); }

  std::shared_ptr<cuda::Device> device;
  std::shared_ptr<cuda::Stream> stream;
};

inline bool passed(DeviceEvent& event) {
  bool yes = false;
  CHECK_OK(event.passed(yes));
  return yes;
}

// Polls what has no event; false when it does not come true.
template <typename Condition>
bool eventually(Condition&& condition, int64_t limit_us = 60'000'000) {
  for (const int64_t end_us = now_us() + limit_us; !condition();) {
    if (now_us() > end_us) return false;
    sched_yield();
  }
  return true;
}

template <typename T>
std::vector<T> values_of(const OutputBuffer& buffer) {
  const auto* data = reinterpret_cast<const T*>(buffer.data.get());
  return {data, data + buffer.bytes / sizeof(T)};
}

}  // namespace horovod::testing
