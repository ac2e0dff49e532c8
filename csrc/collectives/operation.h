// An operation in flight on this rank: its OpSpec, where its bytes are, and how it ended.
//
// Ownership: created by the submitting thread, then owned by the communicator's table until it is done. Only the driver
// (the one thread that holds the communicator's driver lock) runs it and writes outputs, received_splits and status;
// `state` is released last and acquired by the thread that collects the result.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/status.h"
#include "collectives/device.h"
#include "collectives/op_spec.h"

namespace horovod {

// One tensor of an operation: `count` elements at `input`, result to `output` (equal for in-place operations).
// output is null where the size is known only when the operation runs (allgather, alltoall): it then goes to
// outputs[i].
struct Span {
  const std::byte* input = nullptr;
  std::byte* output = nullptr;
  int64_t count = 0;
};

// Result memory that the engine allocated; the framework adopts it without a copy.
struct OutputBuffer {
  std::unique_ptr<std::byte, void (*)(void*)> data{nullptr, nullptr};
  std::shared_ptr<DeviceMemory> on_device;  // owns what `data` points to where that is on a device
  size_t bytes = 0;
  std::vector<int64_t> shape;
  std::byte* room = nullptr;  // memory of the backend that runs the operation, for a result of up to room_bytes
  size_t room_bytes = 0;

  // 64-byte aligned (but for `room`), not cleared. False when there is no memory.
  bool allocate(size_t size);
};

struct Operation {
  enum State : uint32_t { pending = 0, done = 1 };  // done on a device: queued, see OnDevice::finished

  OpSpec spec;
  std::vector<Span> spans;               // one for each of spec.tensors
  std::vector<int32_t> splits;           // alltoall: rows for each member; empty means equal parts
  std::vector<OutputBuffer> outputs;     // allgather, alltoall, reducescatter
  std::vector<int32_t> received_splits;  // alltoall
  std::vector<int64_t> told_rows;        // row counts that came with the arrivals, member-major; empty: none came
  std::unique_ptr<OnDevice> on_device;   // null for tensors in the host's memory
  Status status;
  std::atomic<uint32_t> state{pending};  // futex word
  bool waited_for = false;               // its caller waits for it next, and starts nothing before that
  uint64_t traced = 0;                   // its number in the timeline (engine/timeline.h); 0: not recorded
};

}  // namespace horovod
