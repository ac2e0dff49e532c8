#include "backends/cuda/copier.h"

#include <algorithm>

#include "backends/cuda/compiler.h"
#include "backends/cuda/kernels/copy_spans.h"

namespace horovod::cuda {
namespace {

constexpr size_t kMostBytes = size_t{1} << 31;  // bytes of one span in the table; a longer copy takes several spans

Address address_of(const std::byte* memory) { return reinterpret_cast<Address>(memory); }

}  // namespace

Copier::Copier(std::shared_ptr<Device> device, bool kernel_wanted, const std::string& compiler_file,
               const std::function<void(const std::string&)>& tell)
    : device_(std::move(device)) {
  if (!kernel_wanted) return;
  const Status status = load(compiler_file);
  if (status.ok()) return;
  kernel_ = nullptr;
  tell("Small tensors on GPU " + std::to_string(device_->ordinal()) +
       " are packed one by one, which is slower than by one kernel for all: " + without_code(status.message()));
}

Copier::~Copier() {
  if (!module_ || stays_.load(std::memory_order_relaxed)) return;
  const Device::Current current(*device_);
  (void)device_->driver().unload_module(module_);
}

Status Copier::load(const std::string& compiler_file) {
  const Device::Current current(*device_);
  HVD_TRY(current.status());
  const Driver& driver = device_->driver();
  Status status;
  const CopyKernel* compiled = copy_kernel(compiler_file, device_->capability(), status);
  if (!compiled) return status;
  HVD_TRY(driver.call(driver.load_module, &module_, static_cast<const void*>(compiled->image.data())));
  return driver.call(driver.find_function, &kernel_, module_, CopyKernel::kName);
}

Status Copier::copy(std::span<const Copy> copies, const Stream& stream) const {
  const Device::Current current(*device_);
  HVD_TRY(current.status());
  if (kernel_) return launch(copies, stream);
  const Driver& driver = device_->driver();
  for (const Copy& one : copies) {
    if (one.bytes == 0) continue;
    HVD_TRY(driver.call(driver.copy, address_of(one.to), address_of(one.from), one.bytes, stream.handle()));
  }
  return {};
}

Status Copier::launch(std::span<const Copy> copies, const Stream& stream) const {
  const Driver& driver = device_->driver();
  SpanTable table;  // the driver copies the table while the kernel is launched
  table.spans = 0;
  unsigned chunks = 0;
  const auto flush = [&]() -> Status {
    if (table.spans == 0) return {};
    void* parameters[] = {&table};
    HVD_TRY(driver.call(driver.launch, kernel_, chunks, 1u, 1u, kBlockThreads, 1u, 1u, 0u, stream.handle(),
                        static_cast<void**>(parameters), static_cast<void**>(nullptr)));
    table.spans = chunks = 0;
    return {};
  };
  for (const Copy& whole : copies) {
    for (size_t at = 0; at < whole.bytes;) {
      const size_t bytes = std::min(whole.bytes - at, kMostBytes);
      table.from[table.spans] = address_of(whole.from + at);
      table.to[table.spans] = address_of(whole.to + at);
      table.bytes[table.spans] = static_cast<unsigned>(bytes);
      chunks += static_cast<unsigned>((bytes + kChunkBytes - 1) / kChunkBytes);
      table.end[table.spans] = chunks;
      at += bytes;
      if (++table.spans == kTableSpans) HVD_TRY(flush());
    }
  }
  return flush();
}

}  // namespace horovod::cuda
