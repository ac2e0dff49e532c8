// Bytes per second of every kernel, for each type, operation and variant that this CPU runs. Built as kernels_test is.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <vector>

#include "kernel_cases.h"
#include "kernel_oracle.h"
#include "kernels/adasum.h"
#include "kernels/kernels.h"

using namespace horovod;
using namespace horovod::testing;

namespace {

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

constexpr size_t kBlock = 32 << 10;

// Half precision is summed in float32, so each element has to be widened and rounded: what that leaves of the rate, in
// the cache and where memory sets the pace.
void compare_halves(const std::vector<const char*>& variants) {
  constexpr size_t kLarge = 32 << 20;
  constexpr struct {
    int inputs;
    size_t block_bytes;
  } kColumns[] = {{2, kBlock}, {4, kBlock}, {2, kLarge}, {4, kLarge}};
  std::printf("GB/s of one input, sum, and how much that is of float32's\n%-9s %-9s", "variant", "type");
  for (const auto& [inputs, block_bytes] : kColumns) {
    std::printf(" %8d x %2zu %s  of float32", inputs, block_bytes >> (block_bytes < kLarge ? 10 : 20),
                block_bytes < kLarge ? "KB" : "MB");
  }
  std::printf("\n");
  for (const char* variant : variants) {
    kernels::force_isa(variant);
    double whole[std::size(kColumns)];
    for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16}) {
      std::printf("%-9s %-9s", variant, name_of(dtype));
      for (size_t i = 0; i < std::size(kColumns); ++i) {
        const auto& [inputs, block_bytes] = kColumns[i];
        const double rate = gigabytes_per_s(dtype, ReduceOp::sum, inputs, block_bytes, 1, 0);
        if (dtype == DType::float32) whole[i] = rate;
        std::printf(" %16.1f %10.0f%%", rate, 100 * rate / whole[i]);
      }
      std::printf("\n");
    }
  }
  std::printf("\n");
}

void bench(const std::vector<const char*>& variants) {
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

int main() {
  compare_halves(supported_variants());
  bench(supported_variants());
}
