// Element types and what the engine knows of them. Numbers equal horovod.protos.v1.DataType.
#pragma once

#include <cstddef>
#include <cstdint>

namespace horovod {

enum class DType : uint8_t {
  uint8 = 0,
  int8 = 1,
  int16 = 2,
  int32 = 3,
  int64 = 4,
  float16 = 5,
  bfloat16 = 6,
  float32 = 7,
  float64 = 8,
  boolean = 9,
  uint16 = 10,
  float8_e4m3fn = 11,
  float8_e5m2 = 12,
  uint32 = 13,
  uint64 = 14,
};
inline constexpr int kDTypeCount = 15;

constexpr size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::uint8:
    case DType::int8:
    case DType::boolean:
    case DType::float8_e4m3fn:
    case DType::float8_e5m2:
      return 1;
    case DType::int16:
    case DType::uint16:
    case DType::float16:
    case DType::bfloat16:
      return 2;
    case DType::int32:
    case DType::uint32:
    case DType::float32:
      return 4;
    case DType::int64:
    case DType::uint64:
    case DType::float64:
      return 8;
  }
  return 0;
}

constexpr const char* name_of(DType dtype) {
  constexpr const char* names[kDTypeCount] = {"uint8",   "int8",          "int16",       "int32",   "int64",
                                              "float16", "bfloat16",      "float32",     "float64", "bool",
                                              "uint16",  "float8_e4m3fn", "float8_e5m2", "uint32",  "uint64"};
  return names[static_cast<int>(dtype)];
}

constexpr bool is_float8(DType dtype) { return dtype == DType::float8_e4m3fn || dtype == DType::float8_e5m2; }

constexpr bool is_floating(DType dtype) {
  return is_float8(dtype) || dtype == DType::float16 || dtype == DType::bfloat16 || dtype == DType::float32 ||
         dtype == DType::float64;
}

}  // namespace horovod
