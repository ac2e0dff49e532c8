// Many copies on one device at once: a kernel that takes all of them, or where it can't be had one copy after another.
// Which of the two a rank uses is its own affair.
#pragma once

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

// One thread at a time.
class Copier {
 public:
  // compiler_file: see compiler.h. tell: is given a sentence, once, where the kernel was wanted and can't be had.
  Copier(std::shared_ptr<Device> device, bool kernel_wanted, std::string compiler_file,
         std::function<void(const std::string&)> tell)
      : device_(std::move(device)),
        kernel_wanted_(kernel_wanted),
        compiler_file_(std::move(compiler_file)),
        tell_(std::move(tell)) {}
  ~Copier();
  Copier(const Copier&) = delete;
  Copier& operator=(const Copier&) = delete;

  // Queues them on the stream, in any order; they don't overlap. The first call loads the kernel.
  Status copy(std::span<const Copy> copies, const Stream& stream);

  // The kernel stays loaded for good: it may still run.
  void leave_loaded() { module_ = nullptr; }

 private:
  Status load();
  Status launch(std::span<const Copy> copies, const Stream& stream);

  const std::shared_ptr<Device> device_;
  bool kernel_wanted_;  // and not yet found to be missing
  const std::string compiler_file_;
  const std::function<void(const std::string&)> tell_;
  ModuleHandle module_ = nullptr;
  FunctionHandle kernel_ = nullptr;  // null: not loaded
};

}  // namespace horovod::cuda
