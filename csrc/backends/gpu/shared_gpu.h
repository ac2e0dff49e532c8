// What all process sets of an engine share of the GPU that it uses.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "backends/cuda/copier.h"
#include "backends/cuda/pinned.h"
#include "base/config.h"
#include "collectives/op_spec.h"

namespace horovod {

struct SharedGpu {
  std::shared_ptr<cuda::Device> device;    // null: none is open yet
  std::shared_ptr<cuda::PinnedPool> pool;  // buffers through which tensors go without NCCL
  std::shared_ptr<cuda::Copier> copier;    // packs tensors for NCCL; null: no operation uses NCCL

  // In the thread that submits the first tensor on a GPU. To compile and load the kernel that packs takes it some
  // tenths of a second, once, and now is the time: loading may wait for all that runs on the device, and later that is
  // kernels of NCCL, which end when other ranks have come as far as this one, and they may wait for what this thread is
  // to submit. tell: takes a sentence for the user. An error says why the GPU can't be used.
  static Status open(const Config& config, int ordinal, const std::function<void(const std::string&)>& tell,
                     SharedGpu& gpu);
};

// A bit for each OpType that takes tensors on a GPU.
constexpr unsigned all_operations() {
  unsigned bits = 0;
  for (int type = 0; type < kOpTypeCount; ++type) bits |= kOpTraits[type].on_device ? 1u << type : 0u;
  return bits;
}
inline constexpr unsigned kAllOperations = all_operations();

namespace nccl {
struct Library;
}

// NCCL, if any kind of operation may use it; else null, and a sentence says why.
const nccl::Library* wanted_nccl(const Config& config, std::string& obstacle);

}  // namespace horovod
