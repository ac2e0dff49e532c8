// Every kernel of csrc/kernels against a scalar oracle written in another way, bit by bit and in every variant that
// this CPU runs. Stand-alone, from the repository root (one compiler call per variant, as csrc/kernels/kernels.cmake
// does it):
//
//   for v in portable: avx2:"-mavx2 -mfma -mf16c" avx512:"-mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512vl
//   -mavx512dq"; do g++ -std=c++20 -O3 -ffp-contract=off -Icsrc ${v#*:} -c csrc/kernels/variant_${v%%:*}.cc -o
//   /tmp/${v%%:*}.o; done g++ -std=c++20 -O2 -ffp-contract=off -Icsrc -o /tmp/kernels_test tests/native/kernels_test.cc
//   csrc/kernels/{kernels,cpu,adasum}.cc /tmp/{portable,avx2,avx512}.o   (one line with the one above)
//
// Without arguments it tests; `--bench` prints bytes per second for each type, operation and variant.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kernels/adasum.h"
#include "kernels/kernels.h"

using namespace horovod;

#define CHECK(condition, ...)                                                   \
  do {                                                                          \
    if (!(condition)) {                                                         \
      std::printf("%s:%d: CHECK(%s) failed: ", __FILE__, __LINE__, #condition); \
      std::printf(__VA_ARGS__);                                                 \
      std::printf("\n");                                                        \
      std::exit(1);                                                             \
    }                                                                           \
  } while (0)

namespace {

constexpr DType kDTypes[] = {DType::uint8,   DType::int8,    DType::int16,   DType::uint16,
                             DType::int32,   DType::int64,   DType::float16, DType::bfloat16,
                             DType::float32, DType::float64, DType::boolean};
constexpr ReduceOp kOps[] = {ReduceOp::sum, ReduceOp::min, ReduceOp::max, ReduceOp::product};
constexpr const char* kVariants[] = {"portable", "avx2", "avx512"};

const char* op_name(ReduceOp op) {
  constexpr const char* names[] = {"average", "sum", "adasum", "min", "max", "product"};
  return names[static_cast<int>(op)];
}

// ---------------------------------------------------------------------------------------------------------- the oracle

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

constexpr Layout kFloat16{10, -14, 15, 0x7c00, 0x7e00, 0x8000};
constexpr Layout kBfloat16{7, -126, 127, 0x7f80, 0x7fc0, 0x8000};
constexpr Layout kFloat32{23, -126, 127, 0x7f800000, 0x7fc00000, 0x80000000};
constexpr Layout kFloat64{52, -1022, 1023, 0x7ff0000000000000, 0x7ff8000000000000, 0x8000000000000000};

const Layout& layout_of(DType dtype) {
  return dtype == DType::float16    ? kFloat16
         : dtype == DType::bfloat16 ? kBfloat16
         : dtype == DType::float32  ? kFloat32
                                    : kFloat64;
}

// Zeros of different sign are equal for float32 and float64, where the later one is kept; 16-bit floats order them.
double combine_real(DType dtype, ReduceOp op, double left, double right) {
  if (op == ReduceOp::sum) return left + right;
  if (op == ReduceOp::product) return left * right;
  if (std::isnan(left) || std::isnan(right)) return std::numeric_limits<double>::quiet_NaN();
  if (left == right) return size_of(dtype) > 2 || std::signbit(right) == (op == ReduceOp::min) ? right : left;
  return op == ReduceOp::min ? std::fmin(left, right) : std::fmax(left, right);
}

// Sums and products of two floats are exact enough in double that rounding twice is rounding once (53 >= 2 * 24 + 2).
double in_compute_type(DType dtype, double value) {
  return dtype == DType::float64 ? value : static_cast<double>(static_cast<float>(value));
}

uint64_t get(const void* memory, size_t size) {
  uint64_t bits = 0;
  std::memcpy(&bits, memory, size);
  return bits;
}

bool is_signed(DType dtype) { return dtype != DType::uint8 && dtype != DType::uint16 && dtype != DType::boolean; }

int64_t to_number(DType dtype, uint64_t bits) {
  const int unused = 64 - 8 * static_cast<int>(size_of(dtype));
  return is_signed(dtype) ? static_cast<int64_t>(bits << unused) >> unused : static_cast<int64_t>(bits);
}

uint64_t scaled_integer(DType dtype, uint64_t bits, double factor) {
  const int value_bits = 8 * static_cast<int>(size_of(dtype)) - (is_signed(dtype) ? 1 : 0);
  const long double top = std::ldexp(1.0L, value_bits) - 1;
  const double product = static_cast<double>(to_number(dtype, bits)) * factor;
  if (std::isnan(product)) return 0;
  const long double kept = std::min(std::max<long double>(std::trunc(product), is_signed(dtype) ? -top - 1 : 0), top);
  const uint64_t mask = ~uint64_t{0} >> (64 - 8 * size_of(dtype));
  return static_cast<uint64_t>(static_cast<int64_t>(kept)) & mask;
}

uint64_t oracle_element(DType dtype, ReduceOp op, const std::vector<uint64_t>& column, double postscale) {
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
    const int64_t left = to_number(dtype, static_cast<uint64_t>(value)), right = to_number(dtype, column[k]);
    value = op == ReduceOp::sum       ? value + column[k]
            : op == ReduceOp::product ? value * column[k]
            : op == ReduceOp::min     ? static_cast<uint64_t>(std::min(left, right))
                                      : static_cast<uint64_t>(std::max(left, right));
    value &= ~uint64_t{0} >> (64 - 8 * size_of(dtype));
  }
  const uint64_t bits = static_cast<uint64_t>(value);
  return postscale == 1 ? bits : scaled_integer(dtype, bits, postscale);
}

std::vector<unsigned char> oracle(DType dtype, ReduceOp op, const std::vector<std::vector<unsigned char>>& inputs,
                                  size_t count, double postscale) {
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

// ---------------------------------------------------------------------------------------------------------------- data

std::mt19937_64 generator(20240607);

// Half ordinary values, half any bits at all: infinities, NaNs of every kind, denormals, both zeros.
uint64_t random_bits(DType dtype) {
  const uint64_t random = generator();
  const uint64_t mask = ~uint64_t{0} >> (64 - 8 * size_of(dtype));
  if (dtype == DType::boolean) return random % 4 ? random % 2 : random & 0xff;
  if (!is_floating(dtype) || random % 2) return (random >> 8) & mask;
  switch ((random >> 1) % 16) {
    case 0:
      return (random >> 8) & 1 ? layout_of(dtype).sign : 0;
    case 1:
      return layout_of(dtype).infinity | ((random >> 8) & 1 ? layout_of(dtype).sign : 0);
    case 2:
      return layout_of(dtype).infinity - 1;  // the largest finite value
    case 3:
      return layout_of(dtype).infinity | 1 | ((random >> 8) & 1 ? layout_of(dtype).sign : 0);  // a signalling NaN
    case 4:
      return (random >> 8) & ((uint64_t{1} << layout_of(dtype).fraction_bits) - 1);  // denormal
    default:
      return layout_of(dtype).encode(in_compute_type(dtype, std::normal_distribution<double>(0, 3)(generator)));
  }
}

std::vector<std::vector<unsigned char>> random_inputs(DType dtype, int input_count, size_t count) {
  std::vector<std::vector<unsigned char>> inputs(input_count);
  for (auto& input : inputs) {
    input.resize(count * size_of(dtype));
    for (size_t i = 0; i < count; ++i) {
      const uint64_t bits = random_bits(dtype);
      std::memcpy(input.data() + i * size_of(dtype), &bits, size_of(dtype));
    }
  }
  return inputs;
}

// Memory with a chosen distance from a 64-byte boundary, and guards that show a write outside.
class Guarded {
 public:
  Guarded(const unsigned char* bytes, size_t size, size_t shift)
      : size_(size), memory_(size + shift + 3 * kGuard, 0xa5) {
    const size_t address = reinterpret_cast<size_t>(memory_.data()) + kGuard;
    offset_ = kGuard + (64 - address % 64) % 64 + shift;
    if (bytes && size) std::memcpy(data(), bytes, size);
  }
  unsigned char* data() { return memory_.data() + offset_; }
  bool intact() const {
    const auto is_guard = [](unsigned char byte) { return byte == 0xa5; };
    return std::all_of(memory_.begin(), memory_.begin() + offset_, is_guard) &&
           std::all_of(memory_.begin() + offset_ + size_, memory_.end(), is_guard);
  }

 private:
  static constexpr size_t kGuard = 64;
  size_t size_;
  std::vector<unsigned char> memory_;
  size_t offset_;
};

// --------------------------------------------------------------------------------------------------------------- tests

struct Case {
  const char* variant;
  DType dtype;
  ReduceOp op;
  size_t count;
  double postscale;
  int alias;     // index of the input that is also the output; -1: none
  size_t shift;  // bytes from a 64-byte boundary
};

void check_case(const Case& c, const std::vector<std::vector<unsigned char>>& inputs,
                const std::vector<unsigned char>& expected) {
  const size_t size = size_of(c.dtype), bytes = c.count * size;
  std::vector<Guarded> memory;
  std::vector<const void*> pointers;
  memory.reserve(inputs.size() + 1);
  for (const auto& input : inputs) {
    // Inputs lie differently from one another, whenever that keeps elements as aligned as asked for.
    memory.emplace_back(input.data(), bytes, c.shift + (c.shift % size ? 0 : memory.size() % 3 * size));
    pointers.push_back(memory.back().data());
  }
  if (c.alias < 0) memory.emplace_back(nullptr, bytes, c.shift);
  unsigned char* const output = c.alias < 0 ? memory.back().data() : memory[c.alias].data();
  kernels::reduce(c.dtype, c.op, output, pointers.data(), static_cast<int>(inputs.size()), c.count, c.postscale);
  for (size_t i = 0; i < c.count; ++i) {
    CHECK(std::memcmp(output + i * size, expected.data() + i * size, size) == 0,
          "%s %s %s of %zu inputs, count %zu, postscale %g, alias %d, shift %zu: element %zu is %llx, expected %llx",
          c.variant, name_of(c.dtype), op_name(c.op), inputs.size(), c.count, c.postscale, c.alias, c.shift, i,
          static_cast<unsigned long long>(get(output + i * size, size)),
          static_cast<unsigned long long>(get(expected.data() + i * size, size)));
  }
  for (size_t m = 0; m < memory.size(); ++m) {
    CHECK(memory[m].intact(), "%s %s %s count %zu wrote outside its output", c.variant, name_of(c.dtype), op_name(c.op),
          c.count);
    const bool is_output = c.alias < 0 ? m == inputs.size() : static_cast<int>(m) == c.alias;
    CHECK(is_output || bytes == 0 || std::memcmp(memory[m].data(), inputs[m].data(), bytes) == 0,
          "%s %s %s count %zu changed input %zu", c.variant, name_of(c.dtype), op_name(c.op), c.count, m);
  }
}

// All types, operations and input counts; counts 0 to 70 and a few large ones; every aliasing and alignment in turn.
void test_reduce(const std::vector<const char*>& variants) {
  constexpr size_t kMost = 5003;
  constexpr double kFactors[] = {1.0, 0.5, 1.0 / 3, -2.5, 1e9, 1e-40};
  std::vector<size_t> counts = {127, 128, 1000, 4096, kMost};
  for (size_t count = 0; count <= 70; ++count) counts.push_back(count);
  for (const DType dtype : kDTypes) {
    for (const ReduceOp op : kOps) {
      for (int input_count = 1; input_count <= 9; ++input_count) {
        const auto inputs = random_inputs(dtype, input_count, kMost);
        for (const double postscale : {kFactors[0], kFactors[1 + generator() % 5]}) {
          const auto expected = oracle(dtype, op, inputs, kMost, postscale);
          for (const char* variant : variants) {
            kernels::force_isa(variant);
            for (const size_t count : counts) {
              const int alias = static_cast<int>(generator() % (input_count + 1)) - 1;
              const size_t shift = generator() % 3 ? generator() % 9 * size_of(dtype) : generator() % 64;
              check_case({variant, dtype, op, count, postscale, alias, shift}, inputs, expected);
            }
          }
        }
      }
    }
  }
}

void test_scale(const std::vector<const char*>& variants) {
  constexpr size_t kMost = 1031;
  double odd_nan;
  const uint64_t odd_bits = 0xfff00fffffffffff;
  std::memcpy(&odd_nan, &odd_bits, sizeof odd_nan);
  for (const DType dtype : kDTypes) {
    const size_t size = size_of(dtype);
    const auto inputs = random_inputs(dtype, 1, kMost);
    for (const double factor : {1.0, 0.25, 1.0 / 7, -1.0, 3e5, -0.0, HUGE_VAL, odd_nan}) {
      const auto expected = oracle(dtype, ReduceOp::sum, inputs, kMost, factor);
      for (const char* variant : variants) {
        kernels::force_isa(variant);
        for (const size_t count : {size_t{0}, size_t{1}, size_t{7}, size_t{33}, size_t{64}, kMost}) {
          for (const bool in_place : {false, true}) {
            Guarded input(inputs[0].data(), count * size, size), output(nullptr, count * size, 3 * size);
            Guarded& target = in_place ? input : output;
            kernels::scale(dtype, target.data(), input.data(), count, factor);
            CHECK(count == 0 || std::memcmp(target.data(), expected.data(), count * size) == 0,
                  "%s scale of %zu %s by %g%s", variant, count, name_of(dtype), factor, in_place ? " in place" : "");
            CHECK(input.intact() && output.intact(), "%s scale of %zu %s wrote outside", variant, count,
                  name_of(dtype));
          }
        }
      }
    }
  }
}

// All 65,536 values of the 16-bit floats: through float32 and back unchanged, and rounded right after a multiplication.
void test_every_half(const std::vector<const char*>& variants) {
  for (const DType dtype : {DType::float16, DType::bfloat16}) {
    const Layout& layout = layout_of(dtype);
    std::vector<uint16_t> all(65536), result(65536);
    for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
    for (const char* variant : variants) {
      kernels::force_isa(variant);
      const void* twice[2] = {all.data(), all.data()};
      kernels::reduce(dtype, ReduceOp::max, result.data(), twice, 2, all.size(), 1.0);
      for (size_t i = 0; i < all.size(); ++i) {
        const bool is_nan = (i & (layout.sign - 1)) > layout.infinity;
        CHECK(result[i] == (is_nan ? layout.nan : i), "%s %s %04zx came back as %04x", variant, name_of(dtype), i,
              result[i]);
      }
      for (const double factor : {1 + std::ldexp(1, -11), 1.0 / 3, std::ldexp(1, -12), std::ldexp(3, -20), 1.999, 700.0,
                                  -1 - std::ldexp(1, -8)}) {
        kernels::scale(dtype, result.data(), all.data(), all.size(), factor);
        for (size_t i = 0; i < all.size(); ++i) {
          const float product = static_cast<float>(layout.decode(i)) * static_cast<float>(factor);
          CHECK(result[i] == layout.encode(product), "%s %s %04zx * %g gave %04x, expected %04x", variant,
                name_of(dtype), i, factor, result[i], static_cast<unsigned>(layout.encode(product)));
        }
      }
    }
  }
}

// Sums of halves whose float32 value lies on, just under and just over the middle between two halves.
void test_ties(const std::vector<const char*>& variants) {
  for (const DType dtype : {DType::float16, DType::bfloat16}) {
    const Layout& layout = layout_of(dtype);
    std::vector<uint16_t> large, small;
    for (uint64_t bits = 0; bits < layout.infinity; bits += 7) {
      const double value = layout.decode(bits);
      const double ulp = std::ldexp(1.0, std::max(std::ilogb(value), layout.min_exponent) - layout.fraction_bits);
      for (const double part : {0.5, -0.5, 0.25, 0.75, 0.5 + 1.0 / 64, 0.5 - 1.0 / 64}) {
        large.push_back(static_cast<uint16_t>(bits));
        small.push_back(static_cast<uint16_t>(layout.encode(value == 0 ? 0 : ulp * part)));
      }
    }
    std::vector<uint16_t> result(large.size());
    for (const char* variant : variants) {
      kernels::force_isa(variant);
      const void* inputs[2] = {large.data(), small.data()};
      kernels::reduce(dtype, ReduceOp::sum, result.data(), inputs, 2, large.size(), 1.0);
      for (size_t i = 0; i < large.size(); ++i) {
        const float sum = static_cast<float>(layout.decode(large[i]) + layout.decode(small[i]));
        CHECK(result[i] == layout.encode(sum), "%s %s %04x + %04x gave %04x", variant, name_of(dtype), large[i],
              small[i], result[i]);
      }
    }
  }
}

// The order is left to right: (1 + big) - big is 0 where 1 + (big - big) is 1.
void test_order() {
  const float one = 1, big = 1e20f, minus_big = -1e20f;
  const void* inputs[3] = {&one, &big, &minus_big};
  float result = -1;
  kernels::reduce(DType::float32, ReduceOp::sum, &result, inputs, 3, 1, 1.0);
  CHECK(result == 0, "got %g", result);
  const void* others[3] = {&big, &minus_big, &one};
  kernels::reduce(DType::float32, ReduceOp::sum, &result, others, 3, 1, 1.0);
  CHECK(result == 1, "got %g", result);
}

// The documented example of API users: integer factors truncate toward zero.
void test_integer_average() {
  const int32_t values[3] = {1, -1, 7};
  int32_t result[3];
  kernels::scale(DType::int32, result, values, 3, 1.0 / 3);
  CHECK(result[0] == 0 && result[1] == 0 && result[2] == 2, "got %d %d %d", result[0], result[1], result[2]);
}

void test_check_reduction() {
  for (const DType dtype : kDTypes) {
    for (const ReduceOp op : kOps) CHECK(kernels::check_reduction(dtype, op).ok(), "%s", name_of(dtype));
    CHECK(kernels::check_reduction(dtype, ReduceOp::average).ok() == (dtype != DType::boolean), "%s", name_of(dtype));
    CHECK(kernels::check_reduction(dtype, ReduceOp::adasum).ok() == is_floating(dtype), "%s", name_of(dtype));
  }
  const Status refused = kernels::check_reduction(DType::boolean, ReduceOp::average);
  CHECK(refused.code() == Code::invalid_argument && refused.message().find("Average of bool") == 0, "%s",
        refused.message().c_str());
  CHECK(!kernels::check_reduction(static_cast<DType>(77), ReduceOp::sum).ok(), "unknown type was accepted");
  CHECK(!kernels::check_reduction(DType::int8, static_cast<ReduceOp>(9)).ok(), "unknown reduction was accepted");
}

// The order of summation is part of the promise, so the oracle sums in that order.
kernels::DotProducts expected_dots(DType dtype, const unsigned char* a, const unsigned char* b, size_t count) {
  double sums[3][16] = {};
  for (size_t i = 0; i < count; ++i) {
    const double left = layout_of(dtype).decode(get(a + i * size_of(dtype), size_of(dtype)));
    const double right = layout_of(dtype).decode(get(b + i * size_of(dtype), size_of(dtype)));
    sums[0][i % 16] += left * right;
    sums[1][i % 16] += left * left;
    sums[2][i % 16] += right * right;
  }
  for (auto& sum : sums) {
    for (int half = 8; half > 0; half /= 2)
      for (int i = 0; i < half; ++i) sum[i] += sum[i + half];
    if (std::isnan(sum[0])) sum[0] = std::numeric_limits<double>::quiet_NaN();
  }
  return {sums[0][0], sums[1][0], sums[2][0]};
}

void test_adasum(const std::vector<const char*>& variants) {
  constexpr size_t kMost = 5003;
  std::vector<size_t> counts = {511, 512, 513, 1025, kMost};
  for (size_t count = 0; count <= 70; ++count) counts.push_back(count);
  for (const DType dtype : {DType::float16, DType::bfloat16, DType::float32, DType::float64}) {
    const size_t size = size_of(dtype);
    const Layout& layout = layout_of(dtype);
    for (const bool any_bits : {false, true}) {
      auto inputs = random_inputs(dtype, 2, kMost);
      for (size_t i = 0; i < kMost && !any_bits; ++i) {
        for (auto& input : inputs) {
          const uint64_t bits = layout.encode(std::normal_distribution<double>(0, 1)(generator));
          std::memcpy(input.data() + i * size, &bits, size);
        }
      }
      const double x = 0.75, y = -1.0 / 3;
      std::vector<uint64_t> combined(kMost);
      for (size_t i = 0; i < kMost; ++i) {
        const double left = layout.decode(get(inputs[0].data() + i * size, size)) * in_compute_type(dtype, x);
        const double right = layout.decode(get(inputs[1].data() + i * size, size)) * in_compute_type(dtype, y);
        const double sum = in_compute_type(dtype, left) + in_compute_type(dtype, right);
        combined[i] = layout.encode(in_compute_type(dtype, sum));
      }
      for (const size_t count : counts) {
        const kernels::DotProducts expected = expected_dots(dtype, inputs[0].data(), inputs[1].data(), count);
        for (const char* variant : variants) {
          kernels::force_isa(variant);
          const size_t shift = generator() % 64;
          const int alias = static_cast<int>(generator() % 3);
          Guarded a(inputs[0].data(), count * size, shift), b(inputs[1].data(), count * size, shift / 2);
          Guarded separate(nullptr, count * size, shift);
          const kernels::DotProducts dots = kernels::dot_products(dtype, a.data(), b.data(), count);
          CHECK(std::memcmp(&dots, &expected, sizeof dots) == 0, "%s %s count %zu: %a %a %a, expected %a %a %a",
                variant, name_of(dtype), count, dots.ab, dots.aa, dots.bb, expected.ab, expected.aa, expected.bb);
          Guarded& output = alias == 0 ? a : alias == 1 ? b : separate;
          kernels::weighted_sum(dtype, output.data(), a.data(), x, b.data(), y, count);
          for (size_t i = 0; i < count; ++i)
            CHECK(get(output.data() + i * size, size) == combined[i],
                  "%s weighted sum of %zu %s, element %zu, alias %d", variant, count, name_of(dtype), i, alias);
          CHECK(a.intact() && b.intact() && separate.intact(), "%s %s count %zu wrote outside", variant, name_of(dtype),
                count);
        }
      }
    }
  }
}

// ----------------------------------------------------------------------------------------------------------- benchmark

// Seconds that `work` takes, the best of several runs.
template <class Work>
double best_seconds(size_t block_bytes, Work&& work) {
  const int repeats = static_cast<int>(std::max<size_t>(1, (size_t{1} << 20) / (block_bytes + 64)));
  double best = 1e9;
  for (int round = 0; round < 60; ++round) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < repeats; ++i) work();
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    best = std::min(best, elapsed.count() / repeats);
  }
  return best;
}

std::vector<unsigned char> ones(DType dtype, size_t bytes) {  // denormals would measure something else
  std::vector<unsigned char> memory(bytes);
  const uint64_t one = is_floating(dtype) ? layout_of(dtype).encode(1.0) : 1;
  for (size_t i = 0; i + size_of(dtype) <= bytes; i += size_of(dtype)) std::memcpy(&memory[i], &one, size_of(dtype));
  return memory;
}

// Bytes of one input per second.
double gigabytes_per_s(DType dtype, ReduceOp op, int input_count, size_t block_bytes, double postscale, size_t shift) {
  std::vector<Guarded> memory;
  std::vector<const void*> inputs;
  const auto block = ones(dtype, block_bytes);
  for (int k = 0; k <= input_count; ++k) memory.emplace_back(block.data(), block_bytes, shift);
  for (int k = 0; k < input_count; ++k) inputs.push_back(memory[k].data());
  void* const output = memory[input_count].data();
  const size_t count = block_bytes / size_of(dtype);
  const double seconds = best_seconds(
      block_bytes, [&] { kernels::reduce(dtype, op, output, inputs.data(), input_count, count, postscale); });
  return static_cast<double>(count * size_of(dtype)) / seconds / 1e9;
}

void bench(const std::vector<const char*>& variants) {
  constexpr size_t kBlock = 32 << 10;
  std::printf(
      "GB/s of one input, 32 KB blocks, two inputs; sum/3 has a postscale, sum+u an output off by one element\n");
  std::printf("%-9s %-9s %7s %7s %7s %7s %7s %7s %7s %7s %7s\n", "variant", "type", "sum", "min", "max", "product",
              "sum/3", "sum+u", "3 in", "8 in", "12 in");
  for (const char* variant : variants) {
    kernels::force_isa(variant);
    for (const DType dtype : kDTypes) {
      const auto rate = [&](ReduceOp op, int inputs, double postscale, size_t shift) {
        return gigabytes_per_s(dtype, op, inputs, kBlock, postscale, shift);
      };
      std::printf("%-9s %-9s %7.1f %7.1f %7.1f %7.1f %7.1f %7.1f %7.1f %7.1f %7.1f\n", variant, name_of(dtype),
                  rate(ReduceOp::sum, 2, 1, 0), rate(ReduceOp::min, 2, 1, 0), rate(ReduceOp::max, 2, 1, 0),
                  rate(ReduceOp::product, 2, 1, 0), rate(ReduceOp::sum, 2, 1.0 / 3, 0),
                  rate(ReduceOp::sum, 2, 1, size_of(dtype)), rate(ReduceOp::sum, 3, 1, 0), rate(ReduceOp::sum, 8, 1, 0),
                  rate(ReduceOp::sum, 12, 1, 0));
    }
  }
  std::printf("\nGB/s of one input, 32 KB blocks\n%-9s %-9s %7s %7s %7s\n", "variant", "type", "scale", "dots",
              "a*x+b*y");
  for (const char* variant : variants) {
    kernels::force_isa(variant);
    for (const DType dtype : {DType::float16, DType::bfloat16, DType::float32, DType::float64}) {
      auto a = ones(dtype, kBlock), b = a;
      const size_t count = kBlock / size_of(dtype);
      volatile double sink;  // keeps the sums alive
      const auto rate = [](double seconds) { return kBlock / seconds / 1e9; };
      const double scaling = best_seconds(kBlock, [&] { kernels::scale(dtype, b.data(), a.data(), count, 0.999); });
      const double dots =
          best_seconds(kBlock, [&] { sink = kernels::dot_products(dtype, a.data(), b.data(), count).ab; });
      const double weighing =
          best_seconds(kBlock, [&] { kernels::weighted_sum(dtype, b.data(), a.data(), 0.5, b.data(), 0.5, count); });
      std::printf("%-9s %-9s %7.1f %7.1f %7.1f\n", variant, name_of(dtype), rate(scaling), rate(dots), rate(weighing));
    }
  }
  std::printf("\nns for one call, two inputs, sum, by count\n%-9s %-9s", "variant", "type");
  constexpr size_t kCounts[] = {1, 4, 8, 15, 16, 17, 31, 64, 256};
  for (const size_t count : kCounts) std::printf(" %6zu", count);
  std::printf("\n");
  for (const char* variant : variants) {
    kernels::force_isa(variant);
    for (const DType dtype : {DType::float16, DType::bfloat16, DType::float32, DType::float64}) {
      std::printf("%-9s %-9s", variant, name_of(dtype));
      for (const size_t count : kCounts) {
        const size_t bytes = count * size_of(dtype);
        std::printf(" %6.1f", static_cast<double>(bytes) / gigabytes_per_s(dtype, ReduceOp::sum, 2, bytes, 1, 0));
      }
      std::printf("\n");
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::printf("isa %s\n", kernels::isa());
  std::vector<const char*> variants;
  for (const char* variant : kVariants) {
    if (kernels::force_isa(variant)) {
      CHECK(std::strcmp(kernels::isa(), variant) == 0, "forced %s, got %s", variant, kernels::isa());
      variants.push_back(variant);
    } else {
      std::printf("skipped %s: not in this build or not on this CPU\n", variant);
    }
  }
  CHECK(!variants.empty() && !kernels::force_isa("mmx"), "an unknown variant was accepted");
  if (argc > 1 && std::string(argv[1]) == "--bench") {
    bench(variants);
    return 0;
  }
  test_check_reduction();
  test_order();
  test_integer_average();
  test_every_half(variants);
  test_ties(variants);
  test_scale(variants);
  test_reduce(variants);
  test_adasum(variants);
  std::printf("ok\n");
}
