// The operations of one process set on this member: which are in flight, under which ids they run, and who runs them.
//
// Life of an operation: submit() finds the lane of its name and signature. A lane that has an id arrives in the order
// log at once; a new one is announced to the coordinator, whose plan gives it an id. When the log says that every
// member has arrived, the driver runs the batch and completes the operation.
//
// The driver is whichever thread holds `driving_`: a caller that waits for a result drives itself (no hand-over to
// another thread on the critical path); while nobody waits but operations are pending the background thread drives.
//
// Locks, outermost first: mutex_ (tables, driver hand-over), the order log's own. No lock is held while a batch runs or
// a thread sleeps in the log.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/abort.h"
#include "base/config.h"
#include "collectives/backend.h"
#include "collectives/data_plane.h"
#include "collectives/hierarchical/collectives.h"
#include "collectives/operation.h"
#include "engine/order_log.h"
#include "engine/outbox.h"
#include "engine/timeline.h"
#include "transport/mesh.h"
#include "transport/region.h"

namespace horovod {

class Completions;
struct Lane;
struct NameEntry;

// An operation with what the communicator keeps about it; guarded by Communicator::mutex_ but for the base.
struct Submission final : Operation {
  Lane* lane = nullptr;
  NameEntry* entry = nullptr;
  std::optional<uint64_t> unnamed;   // its number among those without a name of their own
  uint64_t number = 0;               // of all operations that this rank has started
  bool arrived = false;              // in the order log
  bool withdrawing = false;          // withdraw() was asked; the answer decides
  bool zeros = false;                // nobody's: what this member contributes after it has joined
  Status withdrawn_status;           // ends with this when withdrawn; ok means announce again
  int64_t waited_since_us = 0;       // when a thread first waited for it
  int64_t reported_us = 0;           // when the coordinator was last told that a thread is blocked on it
  std::atomic<bool> running{false};  // every rank has arrived; set by the driver before the batch runs
  // Called once when it is done, by the thread of `completions` (set where this is); not if it was not accepted.
  std::function<void(const std::shared_ptr<Submission>&)> on_done;
  Completions* completions = nullptr;

  // As the coordinator knows it.
  std::string announced_name() const { return unnamed ? spec.name + "." + std::to_string(*unnamed) : spec.name; }
};

// Operations of one name and signature run one after another under one id. Lives as long as it has an id or operations;
// one of unnamed operations as long as its variant, because it counts.
struct Lane {
  static constexpr TensorId kNoId = ~TensorId{0};
  OpSpec spec;
  size_t users = 0;  // operations that refer to it
  TensorId id = kNoId;
  TensorId next_id = kNoId;  // of a member that has joined: known already, while `id` is still being taken back
  Submission* active = nullptr;
  std::deque<Submission*> waiting;  // unnamed operations only: they come in order and may overlap
};

struct NameEntry {
  struct Variant {
    uint64_t submitted = 0;
    uint64_t latest = 0;  // unnamed only: `submitted` of the entry when it was last used
    std::vector<std::unique_ptr<Lane>> lanes;
  };
  bool unnamed = false;
  bool in_flight = false;                          // named only
  uint64_t submitted = 0;                          // unnamed only: numbers the announcements
  std::vector<std::unique_ptr<Variant>> variants;  // one for each signature
};

// An operation that waits for other ranks.
struct Unfinished {
  uint64_t number = 0;
  int process_set = 0;
  std::string name;      // as the coordinator knows it
  bool awaited = false;  // by a thread
};

// hvd.join(), see communicator_join.cc. Numbers equal horovod.protos.v1.JoinPhase.
enum class JoinPhase : uint8_t { open = 0, ending = 1, over = 2 };

// Guarded by Communicator::mutex_.
struct Joining {
  uint32_t round = 0;        // rounds that are over
  bool mine = false;         // a thread of this member is in join(), or was interrupted there: nothing is submitted
  bool contributes = false;  // zeros go out for every allreduce that has an id
  bool ending = false;       // the zeros are being taken back, which the coordinator waits for
  size_t zeros = 0;          // submissions of zeros in flight
  std::string others;        // somebody has joined: the coordinator's sentence on it; else empty
  int last_rank = -1;        // who joined last in the latest round that is over
};

struct SharedGpu;

class Communicator {
 public:
  struct Counters {
    std::atomic<uint64_t> announced{0}, submitted{0}, agreed{0}, batches{0}, bytes{0};  // statistics; any order
  };

  // ranks[i] is member i's rank in the world, labels[i] names it in messages; `rank` is this member's place among them.
  // on_abort: called from a driver when it has seen the abort signal, with no lock held; the epoch is over for every
  // communicator of the process, not just for this one.
  Communicator(int process_set, int rank, std::vector<int> ranks, std::vector<std::string> labels,
               std::vector<int> placement, const Config& config, AbortSignal& abort, Outbox& outbox, Timeline& timeline,
               std::function<void()> on_abort);
  ~Communicator();

  // Exactly one of these before the first submit() unless the world has one member.
  void attach(std::unique_ptr<Region> region);
  // hosts: where some members share memory; then `region` is of those of this host, or null where this one is alone.
  void attach(std::unique_ptr<Mesh> mesh, std::unique_ptr<Backend> backend = nullptr,
              std::optional<Hosts> hosts = std::nullopt, std::unique_ptr<Region> region = nullptr);

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(labels_.size()); }
  const std::vector<int>& ranks() const { return ranks_; }
  const Counters& counters() const { return counters_; }
  // Operations that have been submitted and are not done.
  int64_t pending() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return pending_;
  }
  // Of how many kinds of operations (names and signatures) something is kept.
  size_t known();
  // What was submitted and does not run yet, appended.
  void unfinished(std::vector<Unfinished>& found);
  uint64_t sleeps() const { return region_ ? region_->sleeps() : 0; }

  // An operation on a device: finds what runs it there, and marks where its tensors are ready. Before submit().
  // Makes what runs operations on the device, if there is none yet. Any thread.
  Status use(const SharedGpu& gpu);
  Status prepare(Submission& submission, const SharedGpu& gpu);

  // wait_follows: the caller waits next, so the background thread is left asleep.
  Status submit(const std::shared_ptr<Submission>& submission, bool wait_follows);
  // Drives or waits up to timeout_us; true when the operation is done.
  bool wait(Submission& submission, int64_t timeout_us);

  // operation: what runs as `id`, for a member that has joined and may not know it; else null.
  void apply_plan(const std::string& name, TensorId id, const OpSpec* operation = nullptr);
  void apply_error(const std::string& name, const std::string& sentence);
  void apply_recall(const std::vector<TensorId>& ids);
  // sentence: why nothing but allreduces can run.
  void apply_join(uint32_t round, const std::vector<int>& ranks, JoinPhase phase, const std::string& sentence);
  void peer_left(int member, const std::string& sentence);

  // First waits for what this member has in flight, then contributes zeros to the allreduces of others until all
  // members have joined. Up to timeout_us; to be called again until `last_rank` is not negative. ticket: what an
  // earlier call left there, at first kNoTicket.
  static constexpr int64_t kNoTicket = -1;
  Status join(int64_t timeout_us, int64_t& ticket, int& last_rank);

  // The epoch ended (the abort signal is raised): wakes the driver and tells the peers.
  void abort_raised();
  // Leaves in order: what is agreed is finished, everything else fails with `why`. Peers are told `farewell`. Fails
  // when a thread does not come back from an operation though the epoch is over (config's close_timeout_ms): everything
  // that it may still use, this object and the tensors included, must then be kept for ever.
  Status close(const std::string& farewell, const std::string& why = "Horovod has been shut down.");

 private:
  void make_mesh_log();
  size_t fuse(const TensorId* ids, size_t count);
  Status submit_alone(Submission& submission);
  void begin(Submission& submission);
  void announce(Submission& submission);
  void tell_coordinator(OutboxItem::Kind kind, const Submission& submission);
  Lane& lane_for(NameEntry& entry, const Submission& submission);
  void complete(Submission& submission, Status status);
  void forget(TensorId id, const Submission& submission) {
    if (by_id_[id].load(std::memory_order_relaxed) == &submission) by_id_[id].store(nullptr, std::memory_order_relaxed);
  }
  void end(const Status& status);
  void fail_locked(const Status& status);
  Status give_up_locked();
  Status with_context(const Status& status, const Submission& submission) const;
  void set_patient(bool patient);
  // device: busy_device() by now.
  void drive(const std::function<bool()>& enough, int64_t deadline_us, DeviceBackend* device);
  DeviceBackend* busy_device() const { return device_busy() ? device_.get() : nullptr; }
  Status run(const LogEvent& event);
  void answer_withdrawn(TensorId id);
  void finish_recall(Lane& lane);
  void refuse_id(const std::string& what, TensorId id);
  Status refusal(const OpSpec& spec) const;
  void refuse_others();
  Lane& learn(const std::string& name, const OpSpec& operation);
  void take_next_id(Lane& lane);
  void contribute(Lane& lane);
  void complete_zeros(Submission& zeros);
  void release(Lane& lane);
  void forget_if_unused(Lane& lane);
  void make_room(NameEntry& entry);
  void take_zeros_back();
  void tell_joined(bool without_zeros);
  void forget_unnamed();
  void start_background();
  void background();
  bool needs_background() const {
    return ended_.ok() && helpers_ == 0 && (pending_ > 0 || joining_.mine || now_us() < serving_until_us_);
  }
  void serve_peers();
  void run_alone(Submission& submission);
  // Something is queued on a device that will pass: a peer that leaves in order has done its part of it.
  bool device_busy() const {
    return device_ && device_->busy() && (ended_.ok() || (ended_.code() == Code::left && !abort_.raised()));
  }
  Status look_at_peers();
  Status watch_device();
  void tend_device();
  void end_device(bool orderly);

  const int process_set_;
  const int rank_;
  const std::vector<int> ranks_;
  const std::vector<std::string> labels_;
  const std::vector<int> placement_;  // see WorldSpec, by member
  const Config config_;
  AbortSignal& abort_;
  Outbox& outbox_;
  Timeline& timeline_;
  const std::function<void()> on_abort_;
  std::unique_ptr<Mesh> mesh_;
  std::unique_ptr<Region> region_;        // of all members, or beside the mesh of those of this host
  std::unique_ptr<Hierarchy> hierarchy_;  // uses mesh_ and region_
  std::unique_ptr<Backend> backend_;      // uses mesh_
  std::unique_ptr<OrderLog> log_;
  std::unique_ptr<DeviceBackend> device_;  // null until prepare(); uses all of the above. Made with mutex_ held
  std::atomic<DeviceBackend*> watched_device_{nullptr};  // the same for the driver, which does not lock to wait
  int64_t watched_us_ = 0;                               // when it last looked there; driver only
  std::mutex alone_mutex_;  // in a world of one: one thread at a time runs operations on the device
  DataPlane plane_;         // plane_.device: written before the first operation on a device arrives, read when one runs
  Counters counters_;

  std::mutex mutex_;  // guards everything down to the next comment
  // Bounded by the ids that there are and the operations in flight, see forget_if_unused() and make_room().
  std::unordered_map<std::string, NameEntry> names_;
  std::unordered_map<const Lane*, std::unique_ptr<Lane>> retired_;  // of forgotten variants, while they are in use
  std::unordered_map<std::string, Submission*> announced_;          // waiting for the coordinator's plan
  std::unordered_map<Submission*, std::shared_ptr<Submission>> in_flight_;  // owns
  std::vector<Lane*> lane_of_id_;
  std::vector<TensorId> recalled_;  // ids of a recall that are settled, to be answered together
  size_t recalls_open_ = 0;
  Joining joining_;
  int64_t pending_ = 0;
  int64_t serving_until_us_ =
      0;                  // drive until then though nothing is pending here: peers may ask to take arrivals back
  int helpers_ = 0;       // threads inside wait()
  bool driving_ = false;  // some thread is the driver
  bool background_drives_ = false;
  bool background_idle_ = false;  // the background thread waits for work
  bool farewell_due_ = false;     // the epoch was aborted, and it is to see that the peers are told why
  bool device_end_due_ = false;   // the epoch was aborted, and it is to end what runs on the device
  uint64_t unstarted_bytes_ = 0;  // submitted without a waiting caller since the background thread last drove
  uint64_t activity_ = 0;         // submissions, and waits that are over: callers are at it
  bool stopping_ = false;
  bool closed_ = false;
  bool background_over_ = false;                               // it uses nothing of this any more
  Status stuck_;                                               // not ok once close() has given up
  std::vector<std::shared_ptr<Submission>> stuck_operations_;  // what was in flight then
  std::string closed_why_;
  Status ended_;               // not ok once the epoch is over
  std::string left_sentence_;  // a peer left, as the coordinator says
  int64_t left_since_us_ = 0;
  std::condition_variable driver_changed_;  // the driver let go, or operations completed
  // needs_background(), device_busy(), farewell_due_, device_end_due_ or stopping_ became true
  std::condition_variable background_wanted_;

  // What has arrived in the log under an id. Written with mutex_ held: set (release) before the arrival, cleared when
  // it has run or was taken back. Read (acquire) by the driver, which alone ends what has arrived: what it finds here
  // stays while it looks, so the log may ask the fuse rule under a lock of its own.
  std::vector<std::atomic<Submission*>> by_id_;

  // Scratch of the driver.
  LogEvent event_;
  std::vector<Operation*> batch_;

  std::thread background_;
  std::thread device_ending_;  // of a member alone, which has no background thread; see abort_raised()
};

}  // namespace horovod
