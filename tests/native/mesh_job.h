// Operations with memory and known values, and what must come out of reducing them: the oracle of the mesh tests.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <utility>
#include <vector>

#include "collectives/operation.h"

namespace horovod::testing {

// Small integers are exact in every dtype, so that the oracle may compute in double.
inline uint16_t half_of(double value, DType dtype) {
  const auto single = static_cast<float>(value);
  uint32_t bits;
  std::memcpy(&bits, &single, 4);
  if (dtype == DType::bfloat16) return static_cast<uint16_t>(bits >> 16);
  if (value == 0) return 0;
  return static_cast<uint16_t>((bits >> 16 & 0x8000) | (((bits >> 23 & 0xff) - 112) << 10) | (bits >> 13 & 0x3ff));
}
inline double from_half(uint16_t half, DType dtype) {
  uint32_t bits = static_cast<uint32_t>(half) << 16;
  if (dtype == DType::float16) {
    bits = (half & 0x7fff) == 0 ? 0
                                : (static_cast<uint32_t>(half & 0x8000) << 16) | (((half >> 10 & 0x1f) + 112u) << 23) |
                                      (half & 0x3ffu) << 13;
  }
  float single;
  std::memcpy(&single, &bits, 4);
  return single;
}
template <typename T>
void put_as(std::byte* at, double value) {
  const T typed = static_cast<T>(value);
  std::memcpy(at, &typed, sizeof(T));
}
template <typename T>
double get_as(const std::byte* at) {
  T typed;
  std::memcpy(&typed, at, sizeof(T));
  return static_cast<double>(typed);
}
inline void put(DType dtype, std::byte* at, double value) {
  switch (dtype) {
    case DType::uint8:
      return put_as<uint8_t>(at, value);
    case DType::int8:
      return put_as<int8_t>(at, value);
    case DType::int16:
      return put_as<int16_t>(at, value);
    case DType::uint16:
      return put_as<uint16_t>(at, value);
    case DType::int32:
      return put_as<int32_t>(at, value);
    case DType::uint32:
      return put_as<uint32_t>(at, value);
    case DType::int64:
      return put_as<int64_t>(at, value);
    case DType::uint64:
      return put_as<uint64_t>(at, value);
    case DType::float32:
      return put_as<float>(at, value);
    case DType::float64:
      return put_as<double>(at, value);
    case DType::boolean:
      return put_as<uint8_t>(at, value != 0);
    default:
      return put_as<uint16_t>(at, half_of(value, dtype));
  }
}
inline double get(DType dtype, const std::byte* at) {
  switch (dtype) {
    case DType::uint8:
      return get_as<uint8_t>(at);
    case DType::int8:
      return get_as<int8_t>(at);
    case DType::int16:
      return get_as<int16_t>(at);
    case DType::uint16:
      return get_as<uint16_t>(at);
    case DType::int32:
      return get_as<int32_t>(at);
    case DType::uint32:
      return get_as<uint32_t>(at);
    case DType::int64:
      return get_as<int64_t>(at);
    case DType::uint64:
      return get_as<uint64_t>(at);
    case DType::float32:
      return get_as<float>(at);
    case DType::float64:
      return get_as<double>(at);
    case DType::boolean:
      return get_as<uint8_t>(at);
    default:
      return from_half(static_cast<uint16_t>(get_as<uint16_t>(at)), dtype);
  }
}

// Input element i of tensor t on a rank: 0 to 4, so that sums of five ranks stay small.
inline double value_of(int rank, size_t tensor, int64_t i) {
  return static_cast<double>((static_cast<uint64_t>(i) * 7 + tensor * 3 + static_cast<uint64_t>(rank) * 5 + 1) % 5);
}

// One tensor of an operation, with its memory.
struct Tensor {
  DType dtype;
  std::vector<int64_t> shape;
  std::vector<std::byte> input, output;

  Tensor(DType dtype, std::vector<int64_t> shape, int rank, size_t index) : dtype(dtype), shape(std::move(shape)) {
    const int64_t count = elements();
    input.resize(static_cast<size_t>(count) * size_of(dtype));
    output.resize(input.size(), std::byte{0xee});
    for (int64_t i = 0; i < count; ++i) put(dtype, input.data() + i * size_of(dtype), value_of(rank, index, i));
  }
  int64_t elements() const {
    int64_t product = 1;
    for (int64_t d : shape) product *= d;
    return product;
  }
};

struct Job {  // a batch on one rank
  std::deque<Tensor> tensors;
  std::deque<Operation> operations;
  std::vector<Operation*> batch;

  // Each inner list is one operation of several tensors.
  Job(int rank, OpType type, DType dtype, const std::vector<std::vector<std::vector<int64_t>>>& shapes, bool in_place,
      bool has_output) {
    size_t index = 0;
    for (const auto& group : shapes) {
      Operation& operation = operations.emplace_back();
      operation.spec.type = type;
      operation.spec.name = "test";
      operation.spec.reduce_op = ReduceOp::sum;
      for (const auto& shape : group) {
        Tensor& tensor = tensors.emplace_back(dtype, shape, rank, index++);
        operation.spec.tensors.push_back({dtype, shape});
        std::byte* output = !has_output ? nullptr : in_place ? tensor.input.data() : tensor.output.data();
        operation.spans.push_back({tensor.input.data(), output, tensor.elements()});
      }
      batch.push_back(&operation);
    }
  }
};

// What element i of a tensor becomes when the inputs of n ranks are reduced.
inline double reduced(ReduceOp op, int n, size_t tensor, int64_t i, double prescale) {
  double result = 0;
  for (int r = 0; r < n; ++r) {
    const double x = prescale * value_of(r, tensor, i);
    if (r == 0) {
      result = x;
    } else if (op == ReduceOp::min) {
      result = std::min(result, x);
    } else if (op == ReduceOp::max) {
      result = std::max(result, x);
    } else if (op == ReduceOp::product) {
      result *= x;
    } else {
      result += x;
    }
  }
  return result;
}

}  // namespace horovod::testing
