// The part of NCCL that the engine calls, found in libnccl.so.2 when the first GPU tensor comes (see cuda/driver.h).
//
// Declared from NCCL's user guide (docs.nvidia.com/deeplearning/nccl) and the numbers of its public header.
// Version 2.14 is the oldest with communicators that never block the host.
#pragma once

#include <climits>
#include <cstddef>
#include <string>

#include "backends/cuda/driver.h"
#include "base/imported.h"

namespace horovod::nccl {

using CommHandle = struct OpaqueComm*;

struct UniqueId {  // a struct, since NCCL takes it by value
  char bytes[128];
};

enum Result : int {
  kSuccess = 0,
  kSystemError = 2,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7
};

enum DataType : int {
  kInt8 = 0,
  kUint8 = 1,
  kInt32 = 2,
  kUint32 = 3,
  kInt64 = 4,
  kUint64 = 5,
  kFloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBfloat16 = 9,
  kFloat8E4m3 = 10,  // since 2.24
  kFloat8E5m2 = 11
};

inline constexpr int kHasFloat8 = 22400;      // version_code that reduces these,
inline constexpr int kFloat8Capability = 90;  // on GPUs from Hopper on

// Operators beside these are made by create_premul_sum.
enum RedOp : int { kSum = 0, kProduct = 1, kMax = 2, kMin = 3, kAverage = 4 };

inline constexpr int kHostScalar = 1;  // ncclScalarHostImmediate: read before create_premul_sum returns

// ncclConfig_t as 2.14 had it. Later versions only append, and tell by `size` and `version` what a caller knows.
struct Config {
  size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = 21400;
  int blocking = 0;
};
static_assert(sizeof(Config) == 24);

struct Library {
  Imported<int*> version{"ncclGetVersion"};
  Imported<UniqueId*> unique_id{"ncclGetUniqueId"};
  Imported<CommHandle*, int, UniqueId, int, Config*> init_rank{"ncclCommInitRankConfig"};
  Imported<CommHandle> finalize{"ncclCommFinalize"};
  Imported<CommHandle> destroy{"ncclCommDestroy"};
  Imported<CommHandle> abort{"ncclCommAbort"};
  Imported<CommHandle, int*> async_error{"ncclCommGetAsyncError"};
  Imported<> group_start{"ncclGroupStart"};
  Imported<> group_end{"ncclGroupEnd"};
  Imported<int*, void*, int, int, CommHandle> create_premul_sum{"ncclRedOpCreatePreMulSum"};
  Imported<int, CommHandle> destroy_op{"ncclRedOpDestroy"};
  Imported<const void*, void*, size_t, int, int, CommHandle, cuda::StreamHandle> all_reduce{"ncclAllReduce"};
  Imported<const void*, void*, size_t, int, int, CommHandle, cuda::StreamHandle> broadcast{"ncclBroadcast"};
  Imported<const void*, void*, size_t, int, int, int, CommHandle, cuda::StreamHandle> reduce{"ncclReduce"};
  Imported<const void*, void*, size_t, int, int, CommHandle, cuda::StreamHandle> reduce_scatter{"ncclReduceScatter"};
  Imported<const void*, void*, size_t, int, CommHandle, cuda::StreamHandle> all_gather{"ncclAllGather"};
  Imported<const void*, size_t, int, int, CommHandle, cuda::StreamHandle> send{"ncclSend"};
  Imported<void*, size_t, int, int, CommHandle, cuda::StreamHandle> receive{"ncclRecv"};
  // These two functions return a text.
  const char* (*result_text)(int) = nullptr;
  const char* (*last_error)(CommHandle) = nullptr;

  int version_code = 0;  // 22703 is 2.27.3
  std::string file;      // the name under which the loader found the library

  // An error message with NCCL's own words; comm may be null.
  Status failure(const char* function, int result, CommHandle comm) const;
};

// The table of the library in `file`, or of the system's libnccl.so.2 where it is empty; loaded once. Null where there
// is none that can be used; `status` then says what was tried and what to do. Needs neither a GPU nor a driver. Any
// thread.
const Library* library(const std::string& file, Status& status);

}  // namespace horovod::nccl
