// What the kernels must compute, one element at a time and written in another way: floating-point formats by their
// numbers, values held as double, bits made by scaling and rounding.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "base/dtype.h"
#include "base/reduce_op.h"

namespace horovod::testing {

// A binary floating-point format by its numbers; values are held as double and bits are made by scaling and rounding.
struct Layout {
  int fraction_bits, min_exponent, max_exponent;  // of normal numbers
  uint64_t infinity, nan, sign;

  double decode(uint64_t bits) const {
    const uint64_t magnitude = bits & (sign - 1);
    if (magnitude > infinity) return std::numeric_limits<double>::quiet_NaN();
    double value = std::numeric_limits<double>::infinity();
    if (magnitude < infinity) {
      const int exponent_field = static_cast<int>(magnitude >> fraction_bits);
      const uint64_t fraction = magnitude & ((uint64_t{1} << fraction_bits) - 1);
      const uint64_t significand = exponent_field ? fraction + (uint64_t{1} << fraction_bits) : fraction;
      value = std::ldexp(static_cast<double>(significand),
                         (exponent_field ? exponent_field - 1 : 0) + min_exponent - fraction_bits);
    }
    return bits & sign ? -value : value;
  }

  uint64_t encode(double value) const {
    if (std::isnan(value)) return nan;
    const uint64_t sign_bit = std::signbit(value) ? sign : 0;
    const double magnitude = std::fabs(value);
    if (magnitude == 0) return sign_bit;
    if (std::isinf(magnitude)) return sign_bit | infinity;
    const int exponent = std::max(std::ilogb(magnitude), min_exponent);
    const double units = std::nearbyint(std::ldexp(magnitude, fraction_bits - exponent));  // ties to even
    if (std::ldexp(units, exponent - fraction_bits) >= std::ldexp(1.0, max_exponent + 1)) return sign_bit | infinity;
    // A carry out of the fraction adds one to the exponent field by itself.
    return sign_bit |
           ((static_cast<uint64_t>(exponent - min_exponent) << fraction_bits) + static_cast<uint64_t>(units));
  }
};

inline constexpr Layout kFloat16{10, -14, 15, 0x7c00, 0x7e00, 0x8000};
inline constexpr Layout kBfloat16{7, -126, 127, 0x7f80, 0x7fc0, 0x8000};
inline constexpr Layout kFloat32{23, -126, 127, 0x7f800000, 0x7fc00000, 0x80000000};
inline constexpr Layout kFloat64{52, -1022, 1023, 0x7ff0000000000000, 0x7ff8000000000000, 0x8000000000000000};

inline const Layout& layout_of(DType dtype) {
  return dtype == DType::float16    ? kFloat16
         : dtype == DType::bfloat16 ? kBfloat16
         : dtype == DType::float32  ? kFloat32
                                    : kFloat64;
}

// Zeros of different sign are equal for float32 and float64, where the later one is kept; 16-bit floats order them.
inline double combine_real(DType dtype, ReduceOp op, double left, double right) {
  if (op == ReduceOp::sum) return left + right;
  if (op == ReduceOp::product) return left * right;
  if (std::isnan(left) || std::isnan(right)) return std::numeric_limits<double>::quiet_NaN();
  if (left == right) return size_of(dtype) > 2 || std::signbit(right) == (op == ReduceOp::min) ? right : left;
  return op == ReduceOp::min ? std::fmin(left, right) : std::fmax(left, right);
}

// Sums and products of two floats are exact enough in double that rounding twice is rounding once (53 >= 2 * 24 + 2).
inline double in_compute_type(DType dtype, double value) {
  return dtype == DType::float64 ? value : static_cast<double>(static_cast<float>(value));
}

inline uint64_t get(const void* memory, size_t size) {
  uint64_t bits = 0;
  std::memcpy(&bits, memory, size);
  return bits;
}

inline bool is_signed(DType dtype) {
  return dtype == DType::int8 || dtype == DType::int16 || dtype == DType::int32 || dtype == DType::int64;
}

inline __int128 to_number(DType dtype, uint64_t bits) {
  const int unused = 64 - 8 * static_cast<int>(size_of(dtype));
  if (!is_signed(dtype)) return bits;
  return static_cast<int64_t>(bits << unused) >> unused;
}

inline uint64_t scaled_integer(DType dtype, uint64_t bits, double factor) {
  const int value_bits = 8 * static_cast<int>(size_of(dtype)) - (is_signed(dtype) ? 1 : 0);
  const long double top = std::ldexp(1.0L, value_bits) - 1;
  const double product = static_cast<double>(to_number(dtype, bits)) * factor;
  if (std::isnan(product)) return 0;
  const long double kept = std::min(std::max<long double>(std::trunc(product), is_signed(dtype) ? -top - 1 : 0), top);
  const uint64_t mask = ~uint64_t{0} >> (64 - 8 * size_of(dtype));
  return static_cast<uint64_t>(static_cast<__int128>(kept)) & mask;
}

inline uint64_t oracle_element(DType dtype, ReduceOp op, const std::vector<uint64_t>& column, double postscale) {
  if (column.size() == 1 && (postscale == 1 || dtype == DType::boolean)) return column[0];
  if (dtype == DType::boolean) {
    const bool any = op == ReduceOp::sum || op == ReduceOp::max;
    const auto truth = [](uint64_t bits) { return bits != 0; };
    return any ? std::any_of(column.begin(), column.end(), truth) : std::all_of(column.begin(), column.end(), truth);
  }
  if (is_floating(dtype)) {
    const Layout& layout = layout_of(dtype);
    double value = layout.decode(column[0]);
    for (size_t k = 1; k < column.size(); ++k)
      value = in_compute_type(dtype, combine_real(dtype, op, value, layout.decode(column[k])));
    if (postscale != 1) value = in_compute_type(dtype, value * in_compute_type(dtype, postscale));
    return layout.encode(value);
  }
  unsigned __int128 value = column[0];
  for (size_t k = 1; k < column.size(); ++k) {
    const __int128 left = to_number(dtype, static_cast<uint64_t>(value)), right = to_number(dtype, column[k]);
    value = op == ReduceOp::sum       ? value + column[k]
            : op == ReduceOp::product ? value * column[k]
            : op == ReduceOp::min     ? static_cast<uint64_t>(std::min(left, right))
                                      : static_cast<uint64_t>(std::max(left, right));
    value &= ~uint64_t{0} >> (64 - 8 * size_of(dtype));
  }
  const uint64_t bits = static_cast<uint64_t>(value);
  return postscale == 1 ? bits : scaled_integer(dtype, bits, postscale);
}

inline std::vector<unsigned char> oracle(DType dtype, ReduceOp op,
                                         const std::vector<std::vector<unsigned char>>& inputs, size_t count,
                                         double postscale) {
  const size_t size = size_of(dtype);
  std::vector<unsigned char> output(count * size);
  std::vector<uint64_t> column(inputs.size());
  for (size_t i = 0; i < count; ++i) {
    for (size_t k = 0; k < inputs.size(); ++k) column[k] = get(inputs[k].data() + i * size, size);
    const uint64_t bits = oracle_element(dtype, op, column, postscale);
    std::memcpy(output.data() + i * size, &bits, size);
  }
  return output;
}

}  // namespace horovod::testing
