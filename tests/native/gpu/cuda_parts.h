// What the parts of the driver's stand-in share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace standin {

enum Result : int {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNotInitialized = 3,
  kNoDevice = 100,
  kInvalidDevice = 101,
  kInvalidContext = 201,
  kNoBinaryForGpu = 209,
  kInvalidHandle = 400,
  kNotFound = 500,
  kNotReady = 600,
  kIllegalAddress = 700,
  kCaptureUnsupported = 900,
  kCaptureInvalidated = 901,
  kCaptureUnmatched = 903,
  kCaptureIsolation = 905,
};

inline constexpr int kCapability = 90;  // of every device, where STANDIN_CUDA_CAPABILITY names none

// Whether this thread may call now what must not be part of a graph. If not, what is being captured is spoilt.
int allow_unsafe_call();

// What a synchronization does besides waiting, with the world's mutex held.
void release_idle_memory();

// What a call of this function is to answer instead; 0: nothing is planned.
int fault_of(const char* function);

// "modules" that are loaded; "launches" and "copies" (on the device) so far. -1 for another name.
int64_t count_of_modules(const std::string& what);

}  // namespace standin

extern "C" {
int cuCtxGetDevice(int* device);
int cuDeviceGetAttribute(int* value, int attribute, int device);
int cuLaunchHostFunc(void* stream, void (*function)(void*), void* data);
int standin_cuda_holds(const void* address, size_t bytes, int device);
int standin_cuda_device_of(void* stream);
}
