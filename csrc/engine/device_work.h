// A communicator's operations on a device: the backend that runs them, and the watch over its queue while the host goes
// on.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/abort.h"
#include "base/config.h"
#include "collectives/backend.h"
#include "collectives/data_plane.h"
#include "collectives/operation.h"
#include "engine/outbox.h"

namespace horovod {

struct SharedGpu;

// The members of a communicator and this one's place among them.
struct Members {
  int process_set = 0;
  int rank = 0;                     // this member
  std::vector<int> ranks;           // member -> its rank in the world
  std::vector<std::string> labels;  // by member: its name in messages
  std::vector<int> placement;       // by member, see WorldSpec

  int size() const { return static_cast<int>(labels.size()); }
  std::string own_rank() const { return std::to_string(ranks[rank]); }
};

class DeviceWork {
 public:
  // look_at_peers: notices peers that are gone; the driver calls it. on_abort: see Communicator. The objects that are
  // passed by reference must outlive this one.
  DeviceWork(const Members& members, const Config& config, DataPlane& plane, AbortSignal& abort, Outbox& outbox,
             std::function<Status()> look_at_peers, const std::function<void()>& on_abort)
      : members_(members),
        config_(config),
        plane_(plane),
        abort_(abort),
        outbox_(outbox),
        look_at_peers_(std::move(look_at_peers)),
        on_abort_(on_abort) {}

  // Makes the backend of the device, if there is none yet. Any thread, before an operation is submitted.
  Status use(const SharedGpu& gpu);
  // The backend of the device; null until use() has made it. Any thread.
  DeviceBackend* backend() const { return used_.load(std::memory_order_acquire); }
  bool busy() const { return backend() && backend()->busy(); }

  // -- driver only
  Status tend();
  // A batch that waits on the host keeps the driver busy for long. The batch calls this meanwhile, to notice when other
  // work on the device has failed.
  Status watch();

  void end(bool orderly);

  // -- For a world of one, which has no driver. Any thread may call these.
  Status run_alone(Operation& operation);
  void end_alone(bool orderly);

 private:
  const Members& members_;
  const Config& config_;
  DataPlane& plane_;  // plane_.device: written before the first operation on a device arrives, read when one runs
  AbortSignal& abort_;
  Outbox& outbox_;
  const std::function<Status()> look_at_peers_;
  const std::function<void()>& on_abort_;

  std::mutex making_;                          // guards made_ while it is null
  std::unique_ptr<DeviceBackend> made_;        // uses the plane
  std::atomic<DeviceBackend*> used_{nullptr};  // made_.get(), stored (release) once it is complete
  int64_t watched_us_ = 0;                     // when the driver last looked at the device; driver only
  std::mutex alone_;                           // in a world of one: one thread at a time runs operations
};

}  // namespace horovod
