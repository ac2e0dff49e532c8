// One communicator of NCCL with the stream that its operations run on. No call blocks the host: NCCL answers "in
// progress", and a caller that needs the outcome looks again, watching its peers meanwhile.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <utility>

#include "backends/cuda/device.h"
#include "backends/cuda/peers.h"
#include "backends/nccl/library.h"

namespace horovod::nccl {

using cuda::Peers;  // the members; their numbers are NCCL's ranks

class Comm {
 public:
  // For all members at once, which find each other through the CPU's data plane. It fails on all of them when it fails
  // on one; the sentence then names the rank. Also then there is a communicator, which is no good but to be ended: that
  // may wait for all that runs on the device, so the caller must choose when.
  static std::shared_ptr<Comm> create(const Library& library, std::shared_ptr<cuda::Stream> stream, const Peers& peers,
                                      Status& status);
  // Of this rank alone: NCCL's way to multiply a tensor by a factor on the device. When it fails: as above.
  static std::shared_ptr<Comm> alone(const Library& library, std::shared_ptr<cuda::Stream> stream, const Peers& peers,
                                     Status& status);
  ~Comm() { abort(); }
  Comm(const Comm&) = delete;
  Comm& operator=(const Comm&) = delete;

  // Makes the calls as one group, and returns when all of it is queued on the stream. calls(handle) makes them by
  // call().
  template <typename Calls>
  Status group(const Peers& peers, Calls&& calls) {
    HVD_TRY(start_group(std::forward<Calls>(calls)));
    return settle(peers);
  }
  template <typename... Arguments, typename... Given>
  Status call(const Imported<Arguments...>& function, Given... given) const {
    const int result = function(given...);
    if (result == kSuccess || result == kInProgress) [[likely]]
      return {};
    return library_.failure(function.name, result, handle_);
  }

  // Makes an operator that multiplies values by `scalar` (one element of the type, on the host) and sums them.
  Status create_premul_sum(int& op, const void* scalar, DataType type);
  void destroy_op(int op);

  // Fails if the communicator has failed since it was made.
  Status check(const Peers& peers);

  // Ends what runs and frees everything. Any thread. Later calls on this object fail.
  void abort();
  // Ends the communicator in order, when all operations have passed. Waits a moment for NCCL.
  void close(const Peers& peers);

  const Library& library() const { return library_; }
  const std::shared_ptr<cuda::Stream>& stream() const { return stream_; }

 private:
  Comm(const Library& library, std::shared_ptr<cuda::Stream> stream) : library_(library), stream_(std::move(stream)) {}
  Status make_id(UniqueId& id) const;
  Status init(const UniqueId& id, int rank, int size, const Peers& peers);
  template <typename Calls>
  Status start_group(Calls&& calls) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!handle_) return ended();
    const cuda::Device::Current current(stream_->device());
    HVD_TRY(current.status());
    HVD_TRY(call(library_.group_start));
    Status status = calls(handle_);
    Status end = call(library_.group_end);  // called after a failure as well, because it closes the group
    return status.ok() ? end : status;
  }
  Status state_locked(int& state) const;
  // If a lost peer may have caused the error, and somebody names that peer soon, the error becomes "peer lost".
  static Status explain(Status status, int state, const Peers& peers);
  Status settle(const Peers& peers);
  static Status ended();

  const Library& library_;
  const std::shared_ptr<cuda::Stream> stream_;
  std::mutex mutex_;  // guards handle_ and is held for each call, so that an abort comes between two of them
  CommHandle handle_ = nullptr;
};

}  // namespace horovod::nccl
