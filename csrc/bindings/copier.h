// What the Python class Copier does: the engine's copier by itself, without a world and without NCCL, so that a
// benchmark can time the kernel that packs small tensors.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "backends/cuda/copier.h"

namespace horovod {

class PyCopier {
 public:
  PyCopier(int ordinal, bool one_kernel, const std::string& cuda_file, std::string nvrtc_file);
  ~PyCopier();
  PyCopier(const PyCopier&) = delete;
  PyCopier& operator=(const PyCopier&) = delete;

  uintptr_t stream() const { return reinterpret_cast<uintptr_t>(stream_->handle()); }
  const std::string& obstacle() const { return obstacle_; }
  // copies: (from, to, bytes).
  void copy(const std::vector<std::tuple<uintptr_t, uintptr_t, size_t>>& copies, int times);

 private:
  std::string obstacle_;
  std::shared_ptr<cuda::Stream> stream_;
  std::unique_ptr<cuda::Copier> copier_;
  std::shared_ptr<DeviceEvent> last_;  // passes when the copies that were queued last are done
};

}  // namespace horovod
