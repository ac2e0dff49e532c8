// Every kernel of csrc/kernels against a scalar oracle written in another way, bit by bit and in every variant that
// this CPU runs. Stand-alone, from the repository root (one compiler call per variant, as csrc/kernels/kernels.cmake
// does it):
//
//   for v in portable: avx2:"-mavx2 -mfma -mf16c" avx512:"-mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512vl
//   -mavx512dq"; do g++ -std=c++20 -O3 -ffp-contract=off -Icsrc ${v#*:} -c csrc/kernels/variant_${v%%:*}.cc -o
//   /tmp/${v%%:*}.o; done g++ -std=c++20 -O2 -ffp-contract=off -Icsrc -o /tmp/kernels_test tests/native/kernels_test.cc
//   csrc/kernels/{kernels,cpu,adasum}.cc /tmp/{portable,avx2,avx512}.o   (one line with the one above)
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "check.h"
#include "kernel_cases.h"
#include "kernel_oracle.h"
#include "kernels/adasum.h"
#include "kernels/copy.h"
#include "kernels/kernels.h"

using namespace horovod;
using namespace horovod::testing;

namespace {

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
  CHECK(refused.code() == Code::invalid_argument &&
            ends_with(refused, error_code::undefined_reduction, "Average", "bool"),
        "%s", refused.message().c_str());
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

// From and to any place in a cache line, of every length around whole lines.
void test_streamed_copy() {
  std::vector<unsigned char> source(512 + 64);
  for (size_t i = 0; i < source.size(); ++i) source[i] = static_cast<unsigned char>(i * 7 + 1);
  for (size_t size = 0; size <= 512; size += size < 140 ? 1 : 31) {
    for (size_t shift = 0; shift < 64; ++shift) {
      const size_t from = shift * 5 % 64;
      Guarded target(nullptr, size, shift);
      kernels::copy_streamed(reinterpret_cast<std::byte*>(target.data()),
                             reinterpret_cast<const std::byte*>(source.data() + from), size);
      CHECK(std::memcmp(target.data(), source.data() + from, size) == 0 && target.intact(),
            "a streamed copy of %zu bytes to %zu behind a line", size, shift);
    }
  }
}

}  // namespace

int main() {
  const std::vector<const char*> variants = supported_variants();
  test_check_reduction();
  test_order();
  test_integer_average();
  test_every_half(variants);
  test_ties(variants);
  test_scale(variants);
  test_reduce(variants);
  test_adasum(variants);
  test_streamed_copy();
  std::printf("ok\n");
}
