// What NCCL computes, element by element and in rank order.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace standin {

enum Type : int {
  kInt8 = 0,
  kUint8 = 1,
  kInt32 = 2,
  kUint32 = 3,
  kInt64 = 4,
  kUint64 = 5,
  kFloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBfloat16 = 9,
  kFloat8E4m3 = 10,
  kFloat8E5m2 = 11
};
enum Op : int { kSum = 0, kProduct = 1, kMax = 2, kMin = 3, kAverage = 4 };

inline size_t bytes_of(int type) {
  switch (type) {
    case kInt8:
    case kUint8:
    case kFloat8E4m3:
    case kFloat8E5m2:
      return 1;
    case kFloat16:
    case kBfloat16:
      return 2;
    case kInt32:
    case kUint32:
    case kFloat32:
      return 4;
    case kInt64:
    case kUint64:
    case kFloat64:
      return 8;
    default:
      return 0;
  }
}

inline float widen(int type, uint16_t bits) {
  if (type == kBfloat16) {
    const uint32_t word = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &word, sizeof value);
    return value;
  }
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const float sign = bits & 0x8000 ? -1.0f : 1.0f;
  if (exponent == 31) return fraction ? NAN : sign * INFINITY;
  return sign * std::ldexp(static_cast<float>(exponent ? fraction + 1024 : fraction), (exponent ? exponent : 1) - 25);
}

// To nearest even.
inline uint16_t narrow(int type, float value) {
  uint32_t word;
  std::memcpy(&word, &value, sizeof word);
  const auto sign = static_cast<uint16_t>(word >> 16 & 0x8000);
  if (type == kBfloat16) {
    if (std::isnan(value)) return 0x7fc0;
    return static_cast<uint16_t>((word + 0x7fff + (word >> 16 & 1)) >> 16);
  }
  if (std::isnan(value)) return 0x7e00;
  const float size = std::fabs(value);
  if (size >= 65520.0f) return sign | 0x7c00;
  int exponent = 0;
  std::frexp(size, &exponent);
  const int scale = (exponent < -13 ? -13 : exponent) - 11;  // of the last bit
  const auto steps = static_cast<int>(std::nearbyint(std::ldexp(size, -scale)));
  // Steps of 1024 carry into the exponent by themselves.
  return static_cast<uint16_t>(sign | (size < 0x1p-14f ? steps : ((scale + 24) << 10) + steps));
}

// Eight-bit floats, by looking at all of them.
inline float widen8(int type, uint8_t bits) {
  const int fraction_bits = type == kFloat8E4m3 ? 3 : 2, bias = type == kFloat8E4m3 ? 7 : 15;
  const int magnitude = bits & 0x7f, exponent = magnitude >> fraction_bits;
  const int fraction = magnitude & ((1 << fraction_bits) - 1);
  const float sign = bits & 0x80 ? -1.0f : 1.0f;
  if (type == kFloat8E4m3 && magnitude == 0x7f) return NAN;
  if (type == kFloat8E5m2 && exponent == 31) return fraction ? NAN : sign * INFINITY;
  const int steps = exponent ? fraction + (1 << fraction_bits) : fraction;
  return sign * std::ldexp(static_cast<float>(steps), (exponent ? exponent : 1) - bias - fraction_bits);
}

// The nearest of those that are finite; of two, the even one.
inline uint8_t narrow8(int type, float value) {
  if (std::isnan(value)) return 0x7f;
  const uint8_t sign = std::signbit(value) ? 0x80 : 0;
  uint8_t best = 0;
  for (int bits = 1; bits < (type == kFloat8E4m3 ? 0x7f : 0x7c); ++bits) {
    const float distance = std::fabs(std::fabs(value) - widen8(type, static_cast<uint8_t>(bits)));
    const float least = std::fabs(std::fabs(value) - widen8(type, best));
    if (distance < least || (distance == least && bits % 2 == 0)) best = static_cast<uint8_t>(bits);
  }
  return sign | best;
}

template <typename T>
T combined(int op, T left, T right) {
  switch (op) {
    case kProduct:
      return static_cast<T>(left * right);
    case kMax:
      return left < right ? right : left;
    case kMin:
      return right < left ? right : left;
    default:
      return static_cast<T>(left + right);
  }
}

template <typename T>
void combine_as(int op, void* total, const void* part, size_t count) {
  auto* to = static_cast<T*>(total);
  const auto* from = static_cast<const T*>(part);
  for (size_t i = 0; i < count; ++i) to[i] = combined(op, to[i], from[i]);
}

// total = total op part
inline void combine(int type, int op, void* total, const void* part, size_t count) {
  switch (type) {
    case kInt8:
      return combine_as<int8_t>(op, total, part, count);
    case kUint8:
      return combine_as<uint8_t>(op, total, part, count);
    case kInt32:
      return combine_as<int32_t>(op, total, part, count);
    case kUint32:
      return combine_as<uint32_t>(op, total, part, count);
    case kInt64:
      return combine_as<int64_t>(op, total, part, count);
    case kUint64:
      return combine_as<uint64_t>(op, total, part, count);
    case kFloat32:
      return combine_as<float>(op, total, part, count);
    case kFloat64:
      return combine_as<double>(op, total, part, count);
    case kFloat8E4m3:
    case kFloat8E5m2: {
      auto* to = static_cast<uint8_t*>(total);
      const auto* from = static_cast<const uint8_t*>(part);
      for (size_t i = 0; i < count; ++i) {
        to[i] = narrow8(type, combined(op, widen8(type, to[i]), widen8(type, from[i])));
      }
      return;
    }
    default: {
      auto* to = static_cast<uint16_t*>(total);
      const auto* from = static_cast<const uint16_t*>(part);
      for (size_t i = 0; i < count; ++i) {
        to[i] = narrow(type, combined(op, widen(type, to[i]), widen(type, from[i])));
      }
    }
  }
}

template <typename T>
void divide_as(void* data, size_t count, T by) {
  auto* values = static_cast<T*>(data);
  for (size_t i = 0; i < count; ++i) values[i] = static_cast<T>(values[i] / by);
}

// Average of integers, which NCCL divides at the end; truncates toward zero.
inline void divide_integers(int type, void* data, size_t count, int by) {
  if (type == kInt8) divide_as<int8_t>(data, count, static_cast<int8_t>(by));
  if (type == kUint8) divide_as<uint8_t>(data, count, static_cast<uint8_t>(by));
  if (type == kInt32) divide_as<int32_t>(data, count, by);
  if (type == kUint32) divide_as<uint32_t>(data, count, static_cast<uint32_t>(by));
  if (type == kInt64) divide_as<int64_t>(data, count, by);
  if (type == kUint64) divide_as<uint64_t>(data, count, static_cast<uint64_t>(by));
}

inline bool is_integer(int type) { return type <= kUint64; }

// data *= factor, which is a value of the type.
inline void multiply(int type, void* data, const void* factor, size_t count) {
  const size_t bytes = bytes_of(type);
  for (size_t i = 0; i < count; ++i) combine(type, kProduct, static_cast<char*>(data) + i * bytes, factor, 1);
}

}  // namespace standin
