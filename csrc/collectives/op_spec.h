// OpSpec is THE record that describes an operation: what the caller asked for, what ranks must agree on, and when
// an operation is the same as one agreed before. Everything that holds for "an operation" reads it and nothing else.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/reduce_op.h"
#include "collectives/op_types.h"

namespace horovod {

enum class DeviceKind : uint8_t { cpu = 0, gpu = 1 };

// The limits of an operation, which a coordinator checks as well (coordinator/core/agreement/operations.py).
inline constexpr size_t kMostNameCharacters = 4096;
inline constexpr size_t kMostTensors = 1u << 16;
inline constexpr size_t kMostDimensions = 64;

struct TensorSpec {
  DType dtype = DType::float32;
  std::vector<int64_t> shape;

  int64_t elements() const;
  int64_t rows() const { return shape.empty() ? 1 : shape[0]; }
  int64_t row_elements() const;  // product of all dimensions but the first
  size_t bytes() const { return static_cast<size_t>(elements()) * size_of(dtype); }
  int64_t row_bytes() const { return row_elements() * static_cast<int64_t>(size_of(dtype)); }
};

struct OpSpec {
  OpType type = OpType::barrier;
  std::string name;                 // wire name, for example "allreduce.fc1.weight"
  std::vector<TensorSpec> tensors;  // several for a grouped call; they complete together
  ReduceOp reduce_op = ReduceOp::sum;
  double prescale = 1.0;
  double postscale = 1.0;
  int root = 0;
  int process_set = 0;
  DeviceKind device = DeviceKind::cpu;

  // Copies all fields of `other` except the tensors.
  void set_arguments(const OpSpec& other) {
    type = other.type;
    reduce_op = other.reduce_op;
    prescale = other.prescale;
    postscale = other.postscale;
    root = other.root;
    process_set = other.process_set;
  }

  // True when both may run under one id: all that ranks must agree on is equal. Names are not compared, nor the first
  // dimension where rows may be uneven.
  bool agrees_with(const OpSpec& other) const;

  size_t bytes() const;  // bytes of all tensors
  bool uniform_dtype() const;
};

}  // namespace horovod
