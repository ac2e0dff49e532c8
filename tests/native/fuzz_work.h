// What the rank under test of a fuzz target runs, and how patient it is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "base/config.h"
#include "collectives/operation.h"

namespace horovod::testing {

// Some tensors of its own.
struct Work {
  std::vector<float> memory = std::vector<float>(3 * 4096, 1.0f);
  std::deque<Operation> operations;

  Operation* add(OpType type, int64_t elements, int root = 0) {
    Operation& operation = operations.emplace_back();
    operation.spec.type = type;
    operation.spec.name = "fuzz";
    operation.spec.reduce_op = ReduceOp::sum;
    operation.spec.root = root;
    operation.spec.tensors = {{DType::float32, {elements / 3, 3}}};
    auto* at = reinterpret_cast<std::byte*>(memory.data());
    const bool own_output = type == OpType::allreduce || type == OpType::broadcast;
    operation.spans = {{at, own_output ? at : nullptr, elements / 3 * 3}};
    return &operation;
  }
};

inline Config fuzz_config() {
  Config made;
  made.progress_timeout_ms = 50;  // for what waits for a silent peer
  made.spin_us = 0;
  made.look_ahead_us = 0;  // at whatever one peer sends while the other is waited for
  return made;
}

}  // namespace horovod::testing
