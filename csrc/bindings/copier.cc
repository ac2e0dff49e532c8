#include "bindings/copier.h"

#include <utility>

#include <pybind11/pybind11.h>

#include "bindings/errors.h"

namespace horovod {

PyCopier::PyCopier(int ordinal, bool one_kernel, const std::string& cuda_file, std::string nvrtc_file) {
  Status status;
  const cuda::Driver* driver = cuda::driver(cuda_file, status);
  if (!driver) raise_status(status);
  const std::shared_ptr<cuda::Device> device = cuda::Device::open(*driver, ordinal, status);
  if (!device) raise_status(status);
  stream_ = device->create_stream(status);
  if (!stream_) raise_status(status);
  copier_ = std::make_unique<cuda::Copier>(device, one_kernel, std::move(nvrtc_file),
                                           [this](const std::string& sentence) { obstacle_ = sentence; });
}

PyCopier::~PyCopier() {
  bool passed = true;
  if (last_ && (!last_->passed(passed).ok() || !passed)) copier_->leave_loaded();
}

void PyCopier::copy(const std::vector<std::tuple<uintptr_t, uintptr_t, size_t>>& copies, int times) {
  std::vector<cuda::Copy> spans;
  for (const auto& [from, to, bytes] : copies) {
    spans.push_back({reinterpret_cast<const std::byte*>(from), reinterpret_cast<std::byte*>(to), bytes});
  }
  Status status;
  {
    const pybind11::gil_scoped_release release;
    for (int i = 0; i < times && status.ok(); ++i) status = copier_->copy(spans, *stream_);
    if (status.ok()) status = stream_->device().record(stream_->handle(), last_);
  }
  if (!status.ok()) raise_status(status);
}

}  // namespace horovod
