// The order log of members that are connected by a mesh. Rank 0 is the sequencer: members tell it what they have ready,
// it counts, and it tells everybody which batch runs next. Batches reach a member in the order of the sequencer's
// connection, so the log is the same everywhere.
//
//   ready      member -> sequencer   ids this member has arrived at, in order
//   withdraw   member -> sequencer   ids it wants back; answered by `withdrawn`, or by the batch that is already on its
//   way batch      sequencer -> member   one batch. Without ids: the log is closed, the text says why withdrawn
//   sequencer -> member   the answer eager      member -> member      small data, see below
//
// Nothing is sent from arrive() and withdraw(): the driver sends what has gathered as one frame, whenever it looks for
// news (a driver asleep in wait() is woken for it). So a burst of arrivals costs one frame, work that becomes ready
// while a collective runs becomes one batch, and a caller that drives right after it arrived loses nothing. In the same
// way the sequencer decides in poll() only: a member whose sequencer never drives waits for it.
//
// Small operations need no data phase: the bytes go to the sequencer with `ready`, to the other members as `eager`, and
// the sequencer's own with `batch`. When every arrival brought its bytes the batch is eager, and each member computes
// the results before it reports the batch. Whether an arrival brings them is each member's own choice; if one does not,
// or one was taken back meanwhile, the batch runs the ordinary way.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/abort.h"
#include "collectives/hosts.h"
#include "collectives/mesh/eager_store.h"
#include "engine/order_log.h"
#include "transport/mesh.h"

namespace horovod {

enum class Arrival : uint8_t { counted, taken_back, last };

class MeshOrderLog final : public OrderLog {
 public:
  // hosts: null, or in whose order small operations are reduced.
  MeshOrderLog(Mesh& mesh, FuseRule fuse, AbortSignal& abort, const Hosts* hosts = nullptr);

  Status arrive(TensorId id) override { return arrive(id, nullptr); }
  Status arrive_with(TensorId id, Operation& operation) override { return arrive(id, &operation); }
  Status withdraw(TensorId id) override;
  Status poll(LogEvent& event) override;
  Status wait(int64_t timeout_us) override;
  void wake() override { mesh_.wake(); }

  // The sequencer calls it for each arrival that it counts and for each that is taken back, with the innermost lock
  // held; after the one that completes an id, with `last` too. Before the first arrive().
  using Watch = std::function<void(int member, TensorId id, Arrival what)>;
  void watch(Watch watch) { watch_ = std::move(watch); }

 private:
  struct Own {  // what this member knows of an id
    Operation* operation = nullptr;
    uint32_t generation = 0;  // batches with this id that poll() has reported
    bool plain = false;       // taken back since the last batch: the next arrival brings no bytes
    std::string bytes;        // what this member contributes to an eager run
  };
  struct Count {  // what the sequencer knows of an id
    uint32_t arrived = 0;
    std::vector<bool> members;  // who has arrived
    bool plain = false;         // somebody brought no bytes, or was taken back
  };
  struct Agreed {
    TensorId id;
    bool plain;
  };
  struct Gathered {  // one frame to come
    ControlKind kind;
    std::vector<TensorId> ids;
    std::string bytes;
  };
  struct Entry {  // of the log, not yet reported
    LogEvent event;
    bool eager = false;
  };

  bool sequences() const { return mesh_.rank() == 0; }
  Status arrive(TensorId id, Operation* operation);
  // With mutex_ held:
  bool count(int member, TensorId id, bool plain);  // false: it has arrived already
  bool take_back(int member, TensorId id);          // false: agreed or never arrived
  void gather(ControlKind kind, TensorId id);

  Status send_gathered();
  Status receive();
  Status handle(ControlFrame& frame);
  Status handle_as_sequencer(ControlFrame& frame);
  Status handle_as_member(ControlFrame& frame);
  Status decide();
  bool complete(const Entry& entry);
  Status run(const Entry& entry);
  Status report(LogEvent& event, bool& reported);
  bool close(std::string sentence);

  Mesh& mesh_;
  const FuseRule fuse_;
  AbortSignal& abort_;
  const Hosts* const hosts_;
  Watch watch_;

  // Innermost lock of the log: neither the fuse rule nor the mesh is called with it. Guards the next block.
  std::mutex mutex_;
  std::deque<Gathered> gathered_;     // member: to be sent
  std::vector<Own> own_;              // by id
  std::vector<Count> counts_;         // sequencer, by id
  std::vector<Agreed> agreed_;        // sequencer: every member has arrived; in order, not yet in a batch
  std::vector<TensorId> taken_back_;  // own ids, to be reported by poll()
  bool waiting_ = false;              // the driver is in wait() or about to sleep
  bool closed_ = false;

  // The rest belongs to the driver.
  std::deque<Entry> entries_;
  mesh::EagerStore store_{kMaxIds};
  std::string why_closed_;
  std::string departed_;  // member: another member has left, and the sequencer has not closed the log yet
  int64_t departed_since_us_ = 0;
};

}  // namespace horovod
