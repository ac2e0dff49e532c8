// The part of NVIDIA's driver API that the engine calls, found in libcuda.so.1 when the first GPU tensor comes: nothing
// of CUDA is needed to build, and one wheel serves hosts with and without a GPU.
//
// Declared from the driver API's reference (docs.nvidia.com/cuda/cuda-driver-api), which promises that a symbol with
// its suffix (_v2) never changes its meaning.
#pragma once

#include <cstddef>
#include <string>

#include "base/imported.h"

namespace horovod::cuda {

using ContextHandle = struct OpaqueContext*;
using StreamHandle = struct OpaqueStream*;  // null: the legacy default stream
using EventHandle = struct OpaqueEvent*;
using ModuleHandle = struct OpaqueModule*;      // compiled code, loaded into a context
using FunctionHandle = struct OpaqueFunction*;  // a kernel of it
using PoolHandle = struct OpaquePool*;          // of memory
using Address = unsigned long long;             // of device memory

inline constexpr int kOutOfMemory = 2;       // CUDA_ERROR_OUT_OF_MEMORY
inline constexpr int kNotSupported = 801;    // CUDA_ERROR_NOT_SUPPORTED
inline constexpr int kNotReady = 600;        // CUDA_ERROR_NOT_READY: an event has not passed, no failure
inline constexpr unsigned kNonBlocking = 1;  // CU_STREAM_NON_BLOCKING: not ordered with the legacy default stream
inline constexpr unsigned kNoTiming = 2;     // CU_EVENT_DISABLE_TIMING: cheaper, and all that order needs
inline constexpr unsigned kPortable = 1;     // CU_MEMHOSTALLOC_PORTABLE: page-locked for every context
inline constexpr int kCapabilityMajor = 75;  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
inline constexpr int kCapabilityMinor = 76;
inline constexpr int kRelaxed = 2;            // CU_STREAM_CAPTURE_MODE_RELAXED
inline constexpr int kNotCapturing = 0;       // CU_STREAM_CAPTURE_STATUS_NONE
inline constexpr int kImplicitCapture = 906;  // CUDA_ERROR_STREAM_CAPTURE_IMPLICIT: a stream that this one waits for is

inline constexpr int kReleaseThreshold = 4;  // CU_MEMPOOL_ATTR_RELEASE_THRESHOLD

// CUmemPoolProps. What it does not name must be 0.
struct alignas(8) PoolProperties {
  int allocation = 1;  // CU_MEM_ALLOCATION_TYPE_PINNED, the only one that CUDA has
  int handles = 0;     // CU_MEM_HANDLE_TYPE_NONE: for this process alone
  int location = 1;    // CU_MEM_LOCATION_TYPE_DEVICE
  int ordinal = 0;     // the device's number
  unsigned char rest[72]{};
};
static_assert(sizeof(PoolProperties) == 88);

struct Driver {
  Imported<unsigned> init{"cuInit"};
  Imported<int*> version{"cuDriverGetVersion"};
  Imported<int, const char**> error_name{"cuGetErrorName"};
  Imported<int, const char**> error_text{"cuGetErrorString"};
  Imported<int*> device_count{"cuDeviceGetCount"};
  Imported<int*, int> device{"cuDeviceGet"};
  Imported<int*, int, int> attribute{"cuDeviceGetAttribute"};
  Imported<ContextHandle*, int> retain_primary_context{"cuDevicePrimaryCtxRetain"};
  Imported<int> release_primary_context{"cuDevicePrimaryCtxRelease_v2"};
  Imported<ContextHandle> push_context{"cuCtxPushCurrent_v2"};
  Imported<ContextHandle*> pop_context{"cuCtxPopCurrent_v2"};
  Imported<int*, int*> stream_priorities{"cuCtxGetStreamPriorityRange"};
  Imported<StreamHandle*, unsigned, int> create_stream{"cuStreamCreateWithPriority"};
  Imported<StreamHandle> destroy_stream{"cuStreamDestroy_v2"};
  Imported<StreamHandle, EventHandle, unsigned> wait_for_event{"cuStreamWaitEvent"};
  Imported<StreamHandle, int*> capture_status{"cuStreamIsCapturing"};
  Imported<int*> exchange_capture_mode{"cuThreadExchangeStreamCaptureMode"};
  Imported<EventHandle*, unsigned> create_event{"cuEventCreate"};
  Imported<EventHandle> destroy_event{"cuEventDestroy_v2"};
  Imported<EventHandle, StreamHandle> record_event{"cuEventRecord"};
  Imported<EventHandle> query_event{"cuEventQuery"};
  Imported<PoolHandle*, const PoolProperties*> create_pool{"cuMemPoolCreate"};
  Imported<PoolHandle, int, void*> set_pool{"cuMemPoolSetAttribute"};
  Imported<PoolHandle> destroy_pool{"cuMemPoolDestroy"};
  Imported<Address*, size_t, PoolHandle, StreamHandle> allocate{"cuMemAllocFromPoolAsync"};
  Imported<Address, StreamHandle> free{"cuMemFreeAsync"};
  Imported<Address, unsigned char, size_t, StreamHandle> fill{"cuMemsetD8Async"};
  Imported<void**, size_t, unsigned> allocate_pinned{"cuMemHostAlloc"};
  Imported<void*> free_pinned{"cuMemFreeHost"};
  Imported<void*, Address, size_t, StreamHandle> copy_to_host{"cuMemcpyDtoHAsync_v2"};
  Imported<Address, const void*, size_t, StreamHandle> copy_from_host{"cuMemcpyHtoDAsync_v2"};
  Imported<Address, Address, size_t, StreamHandle> copy{"cuMemcpyDtoDAsync_v2"};  // to, from
  Imported<ModuleHandle*, const void*> load_module{"cuModuleLoadData"};
  Imported<ModuleHandle> unload_module{"cuModuleUnload"};
  Imported<FunctionHandle*, ModuleHandle, const char*> find_function{"cuModuleGetFunction"};
  // Blocks, and threads of a block, in three dimensions each; shared memory; and an address for each parameter.
  Imported<FunctionHandle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, StreamHandle, void**,
           void**>
      launch{"cuLaunchKernel"};

  // Calls a function of the table; a failure becomes a sentence with CUDA's own name for it.
  template <typename... Arguments, typename... Given>
  Status call(const Imported<Arguments...>& function, Given... given) const {
    const int result = function(given...);
    if (result == 0) [[likely]]
      return {};
    return failure(function.name, result);
  }
  Status failure(const char* function, int result) const;
};

// The table of the library in `file`, or of the system's where it is empty; loaded once. Null where there is none that
// can be used; `status` then says what was tried and what to do. Touches no GPU. Any thread.
const Driver* driver(const std::string& file, Status& status);

}  // namespace horovod::cuda
