#include "backends/gpu/shared_gpu.h"

#include <cstdlib>
#include <cstring>

#include "backends/nccl/library.h"

namespace horovod {

const nccl::Library* wanted_nccl(const Config& config, std::string& obstacle) {
  if ((config.host_operations & kAllOperations) == kAllOperations) {
    obstacle = "HOROVOD_GPU_OPERATIONS asks for it.";
    return nullptr;
  }
  // NCCL_COMM_BLOCKING overrides the engine's choice: without a deadline NCCL would wait for a rank that is lost.
  if (const char* blocking = std::getenv("NCCL_COMM_BLOCKING"); blocking && std::strcmp(blocking, "1") == 0) {
    obstacle = "NCCL_COMM_BLOCKING=1 is set, with which nothing can end a wait for a lost rank; unset it.";
    return nullptr;
  }
  Status status;
  const nccl::Library* library = nccl::library(config.nccl_file, status);
  obstacle = without_code(status.message());
  return library;
}

Status SharedGpu::open(const Config& config, int ordinal, const std::function<void(const std::string&)>& tell,
                       SharedGpu& gpu) {
  Status status;
  const cuda::Driver* driver = cuda::driver(config.cuda_file, status);
  if (!driver) return status;
  SharedGpu made;
  made.device = cuda::Device::open(*driver, ordinal, status);
  if (!made.device) return status;
  made.pool = std::make_shared<cuda::PinnedPool>(made.device, config.staging_bytes);
  std::string obstacle;
  if (wanted_nccl(config, obstacle)) {
    const bool kernel_wanted = config.batched_copies && config.gpu_pack_threshold_bytes > 0;
    made.copier = std::make_shared<cuda::Copier>(made.device, kernel_wanted, config.nvrtc_file, tell);
  }
  gpu = std::move(made);
  return {};
}

}  // namespace horovod
