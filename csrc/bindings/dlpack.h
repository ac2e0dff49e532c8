// A result handed to a framework as a DLPack capsule (https://dmlc.github.io/dlpack/latest/c_api.html): dtype, shape
// and the memory itself, in one call that every framework understands and without a copy.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <pybind11/pybind11.h>

#include "base/dtype.h"
#include "collectives/operation.h"

namespace horovod {

// The binary interface of DLPack before versions were in it, which all frameworks still take.
struct DlTensor {
  void* data;
  int32_t device_type, device_id;
  int32_t dimensions;
  uint8_t type_code, type_bits;
  uint16_t type_lanes;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};
struct DlManagedTensor {
  DlTensor tensor;
  void* manager;
  void (*deleter)(DlManagedTensor*);
};
static_assert(sizeof(DlTensor) == 48 && sizeof(DlManagedTensor) == 64);

// Owns the memory until its consumer, or the capsule that nobody consumed, calls the deleter.
struct DlResult {
  DlManagedTensor managed{};
  OutputBuffer buffer;
  std::vector<int64_t> strides;
};

inline uint8_t dl_type_code(DType dtype) {
  constexpr uint8_t kInt = 0, kUnsigned = 1, kFloat = 2, kBfloat = 4, kBool = 6;
  switch (dtype) {
    case DType::uint8:
    case DType::uint16:
      return kUnsigned;
    case DType::float16:
    case DType::float32:
    case DType::float64:
      return kFloat;
    case DType::bfloat16:
      return kBfloat;
    case DType::boolean:
      return kBool;
    default:
      return kInt;
  }
}

inline pybind11::capsule to_dlpack(OutputBuffer buffer, DType dtype) {
  constexpr int32_t kCpu = 1, kCuda = 2;
  constexpr const char* kUnconsumed = "dltensor";  // a consumer renames it
  auto result = std::make_unique<DlResult>();
  result->buffer = std::move(buffer);
  std::vector<int64_t>& shape = result->buffer.shape;
  result->strides.resize(shape.size());
  int64_t stride = 1;
  for (size_t i = shape.size(); i-- > 0; stride *= shape[i]) result->strides[i] = stride;
  DlTensor& tensor = result->managed.tensor;
  tensor.data = result->buffer.data.get();
  tensor.device_type = result->buffer.on_device ? kCuda : kCpu;
  tensor.device_id = result->buffer.on_device ? result->buffer.on_device->ordinal() : 0;
  tensor.dimensions = static_cast<int32_t>(shape.size());
  tensor.type_code = dl_type_code(dtype);
  tensor.type_bits = static_cast<uint8_t>(8 * size_of(dtype));
  tensor.type_lanes = 1;
  tensor.shape = shape.data();
  tensor.strides = result->strides.data();
  result->managed.manager = result.get();
  result->managed.deleter = [](DlManagedTensor* managed) { delete static_cast<DlResult*>(managed->manager); };
  pybind11::capsule capsule(&result->managed, kUnconsumed, [](PyObject* object) {
    if (!PyCapsule_IsValid(object, kUnconsumed)) return;
    auto* managed = static_cast<DlManagedTensor*>(PyCapsule_GetPointer(object, kUnconsumed));
    managed->deleter(managed);
  });
  (void)result.release();  // the capsule's from here on
  return capsule;
}

}  // namespace horovod
