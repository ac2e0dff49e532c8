// One GPU as the engine uses it: its primary context (which the framework's runtime shares), streams, events and
// memory. Shared by everything that still holds memory or events of it; the last one lets go of the context.
#pragma once

#include <unistd.h>

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "backends/cuda/driver.h"
#include "collectives/operation.h"

namespace horovod::cuda {

class Stream;

class Device : public std::enable_shared_from_this<Device> {
 public:
  // Null if there is no such GPU, or it can't be used; `status` then says why.
  static std::shared_ptr<Device> open(const Driver& driver, int ordinal, Status& status);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const Driver& driver() const { return driver_; }
  int ordinal() const { return ordinal_; }
  // Its compute capability: 90 for 9.0.
  int capability() const { return capability_; }

  // The device is the calling thread's current one for as long as this lives; afterwards that of before is again.
  //
  // Meanwhile the thread may also do what would spoil a CUDA graph if it belonged to it, like allocating or asking for
  // an event: while one is captured CUDA forbids that to all threads which do not say that they know, and ends the
  // capture. What the engine does is on streams of its own, or refused where the framework's is captured.
  //
  // Inside another one of the same device it costs nothing.
  class Current {
   public:
    explicit Current(const Device& device) : driver_(device.driver_), before_(t_current_) {
      if (before_ == &device) return;
      status_ = driver_.call(driver_.push_context, device.context_);
      if (!status_.ok()) return;
      entered_ = true;
      t_current_ = &device;
      (void)driver_.exchange_capture_mode(&capture_mode_);
    }
    ~Current() {
      if (!entered_) return;
      t_current_ = before_;
      (void)driver_.exchange_capture_mode(&capture_mode_);
      ContextHandle ours;
      (void)driver_.pop_context(&ours);
    }
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;
    const Status& status() const { return status_; }

   private:
    static thread_local const Device* t_current_;  // the device of the innermost Current of this thread

    const Driver& driver_;
    const Device* const before_;
    bool entered_ = false;
    int capture_mode_ = kRelaxed;  // of this object while it is made; afterwards the thread's own mode, to be restored
    Status status_;
  };

  // A stream with the device's highest priority: peers wait for its work, so it comes before the framework's. Null on
  // failure.
  std::shared_ptr<Stream> create_stream(Status& status);

  // An event that has passed when everything that `stream` holds now is done.
  Status record(StreamHandle stream, std::shared_ptr<DeviceEvent>& event);
  // The same, unless `stream` is being captured into a graph.
  Status record_unless_captured(StreamHandle stream, std::shared_ptr<DeviceEvent>& event, bool& captured);

  // Whether what is queued on `stream` becomes part of a CUDA graph instead of being run.
  Status is_captured(StreamHandle stream, bool& yes);

  // Memory for what is queued on `stream` from now on.
  //
  // It comes from a pool of the engine's own, so that the framework's settings for the device's pool stay as they are.
  // The pool holds on to kIdleBytes that nobody uses; without that each synchronization of the device would give all of
  // it back to the system, and the next step ask for it again. What is not in use goes with this object.
  Status allocate(size_t bytes, const std::shared_ptr<Stream>& stream, OutputBuffer& buffer);
  static constexpr uint64_t kIdleBytes = 64u << 20;
  // The same for a result with so many rows of the operation's tensor number `tensor`, which is named when there is
  // none.
  Status allocate_rows(Operation& operation, size_t tensor, int64_t rows, const std::shared_ptr<Stream>& stream);

 private:
  friend class Event;
  friend class Memory;
  friend class Stream;
  Device(const Driver& driver, int ordinal) : driver_(driver), ordinal_(ordinal) {}
  bool is_of_a_parent() const { return owner_process_ != getpid(); }  // a forked child must not call the driver
  void recycle(EventHandle event);
  // Records an event; the caller has made the device current.
  Status record_here(StreamHandle stream, std::shared_ptr<DeviceEvent>& event);
  Status is_captured_here(StreamHandle stream, bool& yes) const;
  Status pool(PoolHandle& pool);
  // Gives memory back in the order of `stream`, which used it.
  void give_back(Address address, StreamHandle stream);
  void give_back_postponed();

  const Driver& driver_;
  const int ordinal_;
  const int owner_process_ = getpid();
  int device_ = 0;  // CUDA's handle of the device
  int capability_ = 0;
  ContextHandle context_ = nullptr;  // null when it could not be retained
  std::mutex mutex_;                 // guards the rest
  std::vector<EventHandle> idle_events_;
  PoolHandle pool_ = nullptr;                                // null: nothing was allocated yet
  std::vector<std::pair<Address, StreamHandle>> postponed_;  // given back while their stream was being captured
};

// A stream of the engine's own. When it is destroyed, what is queued there is still worked off.
class Stream {
 public:
  Stream(std::shared_ptr<Device> device, StreamHandle handle) : device_(std::move(device)), handle_(handle) {}
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  Device& device() const { return *device_; }
  StreamHandle handle() const { return handle_; }

 private:
  const std::shared_ptr<Device> device_;
  const StreamHandle handle_;
};

}  // namespace horovod::cuda
