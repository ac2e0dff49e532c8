// Many copies on one device at once: a kernel that takes all of them, or where it can't be had one copy after another.
// Which of the two a rank uses is its own affair.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "backends/cuda/device.h"

namespace horovod::cuda {

struct Copy {
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  size_t bytes = 0;
};

// Any thread.
class Copier {
 public:
  // Loads the kernel, which may wait for all that runs on the device. compiler_file: see compiler.h. tell: is given a
  // sentence, before this returns, where the kernel was wanted and can't be had.
  Copier(std::shared_ptr<Device> device, bool kernel_wanted, const std::string& compiler_file,
         const std::function<void(const std::string&)>& tell);
  ~Copier();
  Copier(const Copier&) = delete;
  Copier& operator=(const Copier&) = delete;

  // Queues the copies on the stream, in any order; they must not overlap.
  Status copy(std::span<const Copy> copies, const Stream& stream) const;

  // The kernel stays loaded for good: it may still run.
  void leave_loaded() { stays_.store(true, std::memory_order_relaxed); }

 private:
  Status load(const std::string& compiler_file);
  Status launch(std::span<const Copy> copies, const Stream& stream) const;

  const std::shared_ptr<Device> device_;
  ModuleHandle module_ = nullptr;
  FunctionHandle kernel_ = nullptr;  // null: there is none
  std::atomic<bool> stays_{false};   // relaxed: the thread that destroys this object comes after all others
};

}  // namespace horovod::cuda
