// What the kernels are tested and measured with: types, operations, the variants that this CPU runs, random inputs, and
// memory that shows a write outside of it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "check.h"
#include "kernel_oracle.h"
#include "kernels/kernels.h"

namespace horovod::testing {

inline constexpr DType kDTypes[] = {DType::uint8,   DType::int8,    DType::int16,    DType::uint16,  DType::int32,
                                    DType::int64,   DType::float16, DType::bfloat16, DType::float32, DType::float64,
                                    DType::boolean, DType::uint32,  DType::uint64};
inline constexpr ReduceOp kOps[] = {ReduceOp::sum, ReduceOp::min, ReduceOp::max, ReduceOp::product};
inline constexpr const char* kVariants[] = {"portable", "avx2", "avx512"};

inline const char* op_name(ReduceOp op) {
  constexpr const char* names[] = {"average", "sum", "adasum", "min", "max", "product"};
  return names[static_cast<int>(op)];
}

// The variants of this build that this CPU runs; says which one is used unless told otherwise, and which are missing.
inline std::vector<const char*> supported_variants() {
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
  return variants;
}

inline std::mt19937_64 generator(20240607);

// Half ordinary values, half any bits at all: infinities, NaNs of every kind, denormals, both zeros.
inline uint64_t random_bits(DType dtype) {
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

inline std::vector<std::vector<unsigned char>> random_inputs(DType dtype, int input_count, size_t count) {
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

}  // namespace horovod::testing
