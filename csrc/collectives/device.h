// Memory of a device that works by itself: the host queues work there and goes on. On the CPU, an operation's input is
// ready when it is submitted, and its result is there when it is done. On a device, each of the two is a point in a
// queue of work, for which other queues can wait without the host.
#pragma once

#include <cstdint>
#include <memory>

#include "base/status.h"

namespace horovod {

// A point in a device's queue of work. Any thread; nothing here blocks.
class DeviceEvent {
 public:
  virtual ~DeviceEvent() = default;
  // Whether all work that was queued before the event has ended.
  virtual Status passed(bool& yes) = 0;
  // Makes the work that is queued on the framework's `stream` from now on run after the event.
  virtual Status precede(uintptr_t stream) = 0;
};

// The part of an operation that exists only if its tensors are on a device.
struct OnDevice {
  int ordinal = 0;
  uintptr_t stream = 0;                // the framework's, on which the tensors were written
  std::shared_ptr<DeviceEvent> ready;  // passes after all that the framework had queued there
  uint64_t ready_number = 0;  // of two events on one stream the one with the higher number is later; 0: unknown
  std::shared_ptr<DeviceEvent> finished;  // passes when the results are there; null until queued
};

// A result that the engine allocated on a device. Given back when this is destroyed, in the order of the stream that
// uses it: at first the engine's own.
class DeviceMemory {
 public:
  explicit DeviceMemory(int ordinal) : ordinal_(ordinal) {}
  virtual ~DeviceMemory() = default;
  int ordinal() const { return ordinal_; }
  // Hands the memory to the framework's `stream`, which waits until it was filled.
  virtual void hand_over(uintptr_t stream) = 0;

 private:
  const int ordinal_;
};

}  // namespace horovod
