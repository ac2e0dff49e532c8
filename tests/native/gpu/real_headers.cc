// Whether what the engine declares of CUDA, NCCL and NVRTC is what their own headers say: names, parameters, numbers
// and layouts. The engine is built without those headers; where they are installed, test_gpu_libraries.py compiles this
// file. It is a program because names are compared when it runs.
#include <cuda.h>
#include <nccl.h>
#include <nvrtc.h>

#include <cstddef>
#include <cstdio>
#include <cstring>
#include <type_traits>

#include "backends/cuda/compiler.h"
#include "backends/cuda/driver.h"
#include "backends/nccl/library.h"

using namespace horovod;

namespace {

// Whether a caller passes both alike: numbers of one size, pointers to numbers of one size or to what is opaque.
template <typename Ours, typename Theirs>
constexpr bool alike() {
  if constexpr (std::is_pointer_v<Ours> && std::is_pointer_v<Theirs>) {
    using A = std::remove_cv_t<std::remove_pointer_t<Ours>>;
    using B = std::remove_cv_t<std::remove_pointer_t<Theirs>>;
    if constexpr (std::is_void_v<A> || std::is_void_v<B>) {
      return true;
    } else if constexpr (std::is_class_v<A> || std::is_class_v<B>) {
      return std::is_class_v<A> && std::is_class_v<B>;
    } else {
      return alike<A, B>();
    }
  } else if constexpr (std::is_class_v<Ours> && std::is_class_v<Theirs>) {
    return sizeof(Ours) == sizeof(Theirs) && alignof(Ours) == alignof(Theirs);
  } else {
    return std::is_pointer_v<Ours> == std::is_pointer_v<Theirs> && std::is_class_v<Ours> == std::is_class_v<Theirs> &&
           std::is_floating_point_v<Ours> == std::is_floating_point_v<Theirs> && sizeof(Ours) == sizeof(Theirs);
  }
}

template <typename... Ours, typename Result, typename... Theirs>
constexpr bool same_call(const Imported<Ours...>*, Result (*)(Theirs...)) {
  static_assert(sizeof(Result) == sizeof(int));
  if constexpr (sizeof...(Ours) == sizeof...(Theirs)) {
    return (alike<Ours, Theirs>() && ...);
  } else {
    return false;
  }
}

template <typename Function>
constexpr Function* no_function = nullptr;

int g_different = 0;

void compare_names(const char* ours, const char* theirs) {
  if (std::strcmp(ours, theirs) == 0) return;
  std::printf("programs that are compiled now call %s, not %s\n", theirs, ours);
  ++g_different;
}

// The second time as the header's macros have it: cuCtxPushCurrent is cuCtxPushCurrent_v2.
#define NAME_OF(function) NAME_OF_EXPANDED(function)
#define NAME_OF_EXPANDED(function) #function
#define SAME(entry, function)                                                                                     \
  static_assert(same_call(static_cast<decltype(&(entry))>(nullptr), no_function<decltype(function)>), #function); \
  compare_names((entry).name, NAME_OF(function))

void compare_cuda() {
  static const cuda::Driver driver;
  SAME(driver.init, cuInit);
  SAME(driver.version, cuDriverGetVersion);
  SAME(driver.error_name, cuGetErrorName);
  SAME(driver.error_text, cuGetErrorString);
  SAME(driver.device_count, cuDeviceGetCount);
  SAME(driver.device, cuDeviceGet);
  SAME(driver.attribute, cuDeviceGetAttribute);
  SAME(driver.retain_primary_context, cuDevicePrimaryCtxRetain);
  SAME(driver.release_primary_context, cuDevicePrimaryCtxRelease);
  SAME(driver.push_context, cuCtxPushCurrent);
  SAME(driver.pop_context, cuCtxPopCurrent);
  SAME(driver.stream_priorities, cuCtxGetStreamPriorityRange);
  SAME(driver.create_stream, cuStreamCreateWithPriority);
  SAME(driver.destroy_stream, cuStreamDestroy);
  SAME(driver.wait_for_event, cuStreamWaitEvent);
  SAME(driver.capture_status, cuStreamIsCapturing);
  SAME(driver.exchange_capture_mode, cuThreadExchangeStreamCaptureMode);
  SAME(driver.create_event, cuEventCreate);
  SAME(driver.destroy_event, cuEventDestroy);
  SAME(driver.record_event, cuEventRecord);
  SAME(driver.query_event, cuEventQuery);
  SAME(driver.create_pool, cuMemPoolCreate);
  SAME(driver.set_pool, cuMemPoolSetAttribute);
  SAME(driver.destroy_pool, cuMemPoolDestroy);
  SAME(driver.allocate, cuMemAllocFromPoolAsync);
  SAME(driver.free, cuMemFreeAsync);
  SAME(driver.fill, cuMemsetD8Async);
  SAME(driver.allocate_pinned, cuMemHostAlloc);
  SAME(driver.free_pinned, cuMemFreeHost);
  SAME(driver.copy_to_host, cuMemcpyDtoHAsync);
  SAME(driver.copy_from_host, cuMemcpyHtoDAsync);
  SAME(driver.copy, cuMemcpyDtoDAsync);
  SAME(driver.load_module, cuModuleLoadData);
  SAME(driver.unload_module, cuModuleUnload);
  SAME(driver.find_function, cuModuleGetFunction);
  SAME(driver.launch, cuLaunchKernel);

  static_assert(cuda::kOutOfMemory == CUDA_ERROR_OUT_OF_MEMORY);
  static_assert(cuda::kNotSupported == CUDA_ERROR_NOT_SUPPORTED);
  static_assert(cuda::kNotReady == CUDA_ERROR_NOT_READY);
  static_assert(cuda::kImplicitCapture == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
  static_assert(cuda::kNonBlocking == CU_STREAM_NON_BLOCKING);
  static_assert(cuda::kNoTiming == CU_EVENT_DISABLE_TIMING);
  static_assert(cuda::kPortable == CU_MEMHOSTALLOC_PORTABLE);
  static_assert(cuda::kCapabilityMajor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
  static_assert(cuda::kCapabilityMinor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
  static_assert(cuda::kRelaxed == CU_STREAM_CAPTURE_MODE_RELAXED);
  static_assert(cuda::kNotCapturing == CU_STREAM_CAPTURE_STATUS_NONE);
  static_assert(cuda::kReleaseThreshold == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD);

  using Ours = cuda::PoolProperties;
  using Theirs = CUmemPoolProps;
  static_assert(sizeof(Ours) == sizeof(Theirs) && alignof(Ours) == alignof(Theirs));
  static_assert(offsetof(Ours, allocation) == offsetof(Theirs, allocType));
  static_assert(offsetof(Ours, handles) == offsetof(Theirs, handleTypes));
  static_assert(offsetof(Ours, location) == offsetof(Theirs, location) + offsetof(CUmemLocation, type));
  static_assert(offsetof(Ours, ordinal) == offsetof(Theirs, location) + offsetof(CUmemLocation, id));
  static_assert(Ours().allocation == CU_MEM_ALLOCATION_TYPE_PINNED && Ours().handles == CU_MEM_HANDLE_TYPE_NONE);
  static_assert(Ours().location == CU_MEM_LOCATION_TYPE_DEVICE);
}

void compare_nccl() {
  static const nccl::Library library;
  SAME(library.version, ncclGetVersion);
  SAME(library.unique_id, ncclGetUniqueId);
  SAME(library.init_rank, ncclCommInitRankConfig);
  SAME(library.finalize, ncclCommFinalize);
  SAME(library.destroy, ncclCommDestroy);
  SAME(library.abort, ncclCommAbort);
  SAME(library.async_error, ncclCommGetAsyncError);
  SAME(library.group_start, ncclGroupStart);
  SAME(library.group_end, ncclGroupEnd);
  SAME(library.create_premul_sum, ncclRedOpCreatePreMulSum);
  SAME(library.destroy_op, ncclRedOpDestroy);
  SAME(library.all_reduce, ncclAllReduce);
  SAME(library.broadcast, ncclBroadcast);
  SAME(library.reduce, ncclReduce);
  SAME(library.reduce_scatter, ncclReduceScatter);
  SAME(library.all_gather, ncclAllGather);
  SAME(library.send, ncclSend);
  SAME(library.receive, ncclRecv);
  static_assert(std::is_same_v<decltype(ncclGetErrorString), const char*(ncclResult_t)>);
  static_assert(std::is_same_v<decltype(ncclGetLastError), const char*(ncclComm_t)>);

  static_assert(nccl::kSuccess == static_cast<int>(ncclSuccess));
  static_assert(nccl::kSystemError == static_cast<int>(ncclSystemError));
  static_assert(nccl::kInvalidArgument == static_cast<int>(ncclInvalidArgument));
  static_assert(nccl::kInvalidUsage == static_cast<int>(ncclInvalidUsage));
  static_assert(nccl::kRemoteError == static_cast<int>(ncclRemoteError));
  static_assert(nccl::kInProgress == static_cast<int>(ncclInProgress));

  static_assert(nccl::kInt8 == static_cast<int>(ncclInt8) && nccl::kUint8 == static_cast<int>(ncclUint8));
  static_assert(nccl::kInt32 == static_cast<int>(ncclInt32) && nccl::kUint32 == static_cast<int>(ncclUint32));
  static_assert(nccl::kInt64 == static_cast<int>(ncclInt64) && nccl::kUint64 == static_cast<int>(ncclUint64));
  static_assert(nccl::kFloat16 == static_cast<int>(ncclFloat16) && nccl::kFloat32 == static_cast<int>(ncclFloat32));
  static_assert(nccl::kFloat64 == static_cast<int>(ncclFloat64) && nccl::kBfloat16 == static_cast<int>(ncclBfloat16));
#if NCCL_VERSION_CODE >= 22400
  static_assert(nccl::kHasFloat8 == NCCL_VERSION(2, 24, 0));
  static_assert(nccl::kFloat8E4m3 == static_cast<int>(ncclFloat8e4m3));
  static_assert(nccl::kFloat8E5m2 == static_cast<int>(ncclFloat8e5m2));
#endif
  static_assert(nccl::kSum == static_cast<int>(ncclSum) && nccl::kProduct == static_cast<int>(ncclProd));
  static_assert(nccl::kMax == static_cast<int>(ncclMax) && nccl::kMin == static_cast<int>(ncclMin));
  static_assert(nccl::kAverage == static_cast<int>(ncclAvg));
  static_assert(nccl::kHostScalar == static_cast<int>(ncclScalarHostImmediate));
  static_assert(sizeof(nccl::UniqueId) == NCCL_UNIQUE_ID_BYTES);

  // Later versions append to it, so ours is how theirs begins.
  using Ours = nccl::Config;
  using Theirs = ncclConfig_t;
  static_assert(sizeof(Ours) <= sizeof(Theirs) && alignof(Ours) == alignof(Theirs));
  static_assert(offsetof(Ours, size) == offsetof(Theirs, size) && offsetof(Ours, magic) == offsetof(Theirs, magic));
  static_assert(offsetof(Ours, version) == offsetof(Theirs, version));
  static_assert(offsetof(Ours, blocking) == offsetof(Theirs, blocking));
  static_assert(Ours().version == NCCL_VERSION(2, 14, 0));
  const ncclConfig_t initial = NCCL_CONFIG_INITIALIZER;
  if (initial.magic != Ours().magic) {
    std::puts("ncclConfig_t has another magic number");
    ++g_different;
  }
}

void compare_nvrtc() {
  static const cuda::Compiler compiler;
  SAME(compiler.target_count, nvrtcGetNumSupportedArchs);
  SAME(compiler.targets, nvrtcGetSupportedArchs);
  SAME(compiler.create, nvrtcCreateProgram);
  SAME(compiler.destroy, nvrtcDestroyProgram);
  SAME(compiler.compile, nvrtcCompileProgram);
  SAME(compiler.log_size, nvrtcGetProgramLogSize);
  SAME(compiler.log, nvrtcGetProgramLog);
  SAME(compiler.cubin_size, nvrtcGetCUBINSize);
  SAME(compiler.cubin, nvrtcGetCUBIN);
  SAME(compiler.ptx_size, nvrtcGetPTXSize);
  SAME(compiler.ptx, nvrtcGetPTX);
  static_assert(std::is_same_v<decltype(nvrtcGetErrorString), const char*(nvrtcResult)>);
}

}  // namespace

int main() {
  compare_cuda();
  compare_nccl();
  compare_nvrtc();
  return g_different == 0 ? 0 : 1;
}
