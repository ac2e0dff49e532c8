// DLPack (https://dmlc.github.io/dlpack/latest/c_api.html), what every framework understands: a result is handed over
// as a capsule with dtype, shape and the memory itself, without a copy; and a tensor that comes in is read in C.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <pybind11/pybind11.h>

#include "base/dtype.h"
#include "collectives/operation.h"

namespace horovod {

// The binary interface of DLPack before versions were in it, which all frameworks still take.
enum DlTypeCode : uint8_t { kDlInt = 0, kDlUnsigned = 1, kDlFloat = 2, kDlBfloat = 4, kDlBool = 6 };
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

inline constexpr int32_t kDlCpu = 1, kDlCuda = 2;

// The same with a version.
struct DlManagedVersioned {
  uint32_t major, minor;
  void* manager;
  void (*deleter)(DlManagedVersioned*);
  uint64_t flags;
  DlTensor tensor;
};
static_assert(sizeof(DlManagedVersioned) == 80);

// What a framework offers since DLPack 1.2, as the capsule `__dlpack_c_exchange_api__` of its tensor's type. Functions
// that are not called here have no signature.
struct DlExchangeApi {
  static constexpr const char* kAttribute = "__dlpack_c_exchange_api__";
  static constexpr const char* kCapsule = "dlpack_exchange_api";
  // Another major version may have another layout, but for the first three members.
  static constexpr uint32_t kMajor = 1;

  uint32_t major, minor;
  const DlExchangeApi* previous;  // the table of an older version
  void* allocate;
  void* managed_from_object;
  int (*managed_to_object)(DlManagedVersioned* tensor, void** object);  // takes the tensor over; not 0: an exception
  int (*tensor_from_object)(void* object, DlTensor* out);               // not 0: a Python exception is set
  int (*current_work_stream)(int32_t device_type, int32_t device_id, void** out);
};
static_assert(sizeof(DlExchangeApi) == 56);

// False for a type that the engine does not know.
inline bool dtype_from(const DlTensor& tensor, DType& dtype) {
  if (tensor.type_lanes != 1) return false;
  const auto is = [&](DlTypeCode code, int bits, DType found) {
    if (tensor.type_code != code || tensor.type_bits != bits) return false;
    dtype = found;
    return true;
  };
  return is(kDlFloat, 32, DType::float32) || is(kDlFloat, 64, DType::float64) || is(kDlFloat, 16, DType::float16) ||
         is(kDlBfloat, 16, DType::bfloat16) || is(kDlInt, 64, DType::int64) || is(kDlInt, 32, DType::int32) ||
         is(kDlInt, 16, DType::int16) || is(kDlInt, 8, DType::int8) || is(kDlUnsigned, 8, DType::uint8) ||
         is(kDlUnsigned, 16, DType::uint16) || is(kDlUnsigned, 32, DType::uint32) ||
         is(kDlUnsigned, 64, DType::uint64) || is(kDlBool, 8, DType::boolean);
}

// Whether elements follow each other in memory, the last dimension first.
inline bool is_contiguous(const DlTensor& tensor) {
  if (!tensor.strides) return true;
  bool contiguous = true;
  int64_t stride = 1;
  for (int32_t i = tensor.dimensions; i-- > 0; stride *= tensor.shape[i]) {
    if (tensor.shape[i] == 0) return true;
    contiguous = contiguous && (tensor.shape[i] == 1 || tensor.strides[i] == stride);
  }
  return contiguous;
}

inline DlTypeCode dl_type_code(DType dtype) {
  switch (dtype) {
    case DType::uint8:
    case DType::uint16:
    case DType::uint32:
    case DType::uint64:
    case DType::float8_e4m3fn:  // older frameworks don't know DLPack's codes for these: they are told as bytes, and the
    case DType::float8_e5m2:    // consumer, who knows better, views them as what they are
      return kDlUnsigned;
    case DType::float16:
    case DType::float32:
    case DType::float64:
      return kDlFloat;
    case DType::bfloat16:
      return kDlBfloat;
    case DType::boolean:
      return kDlBool;
    default:
      return kDlInt;
  }
}

// Owns the memory until its consumer calls the deleter. Managed: DlManagedTensor or DlManagedVersioned.
template <typename Managed>
struct DlResult {
  Managed managed{};
  OutputBuffer buffer;
  std::vector<int64_t> strides;
};

template <typename Managed>
std::unique_ptr<DlResult<Managed>> managed_result(OutputBuffer buffer, DType dtype) {
  auto result = std::make_unique<DlResult<Managed>>();
  result->buffer = std::move(buffer);
  std::vector<int64_t>& shape = result->buffer.shape;
  result->strides.resize(shape.size());
  int64_t stride = 1;
  for (size_t i = shape.size(); i-- > 0; stride *= shape[i]) result->strides[i] = stride;
  DlTensor& tensor = result->managed.tensor;
  tensor.data = result->buffer.data.get();
  tensor.device_type = result->buffer.on_device ? kDlCuda : kDlCpu;
  tensor.device_id = result->buffer.on_device ? result->buffer.on_device->ordinal() : 0;
  tensor.dimensions = static_cast<int32_t>(shape.size());
  tensor.type_code = dl_type_code(dtype);
  tensor.type_bits = static_cast<uint8_t>(8 * size_of(dtype));
  tensor.type_lanes = 1;
  tensor.shape = shape.data();
  tensor.strides = result->strides.data();
  result->managed.manager = result.get();
  result->managed.deleter = [](Managed* managed) { delete static_cast<DlResult<Managed>*>(managed->manager); };
  return result;
}

inline pybind11::capsule to_dlpack(OutputBuffer buffer, DType dtype) {
  constexpr const char* kUnconsumed = "dltensor";  // a consumer renames it
  auto result = managed_result<DlManagedTensor>(std::move(buffer), dtype);
  pybind11::capsule capsule(&result->managed, kUnconsumed, [](PyObject* object) {
    if (!PyCapsule_IsValid(object, kUnconsumed)) return;
    auto* managed = static_cast<DlManagedTensor*>(PyCapsule_GetPointer(object, kUnconsumed));
    managed->deleter(managed);
  });
  (void)result.release();  // the capsule's from here on
  return capsule;
}

}  // namespace horovod
