// The operations of one process set on this member: what is decided in the tensor table is carried out here, towards
// the order log, the coordinator and the callers that wait.
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
#include "engine/join.h"
#include "engine/order_log.h"
#include "engine/outbox.h"
#include "engine/tensor_table.h"
#include "engine/timeline.h"
#include "transport/mesh.h"
#include "transport/region.h"

namespace horovod {

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
    return static_cast<int64_t>(table_.in_flight().size());
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
  // Carries out effects_, with mutex_ held. True when operations have ended.
  bool apply_effects();
  // The same for a thread that is not the driver, which is told.
  void apply_effects_beside_driver();
  void tell_coordinator(OutboxItem::Kind kind, const Submission& submission);
  bool make_zeros(Submission& zeros);
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
  void refuse_id(const std::string& what, TensorId id);
  void start_background();
  void background();
  bool is_pending() const { return !table_.in_flight().empty(); }
  bool needs_background() const {
    return ended_.ok() && helpers_ == 0 && (is_pending() || join_.joined() || now_us() < serving_until_us_);
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

  std::mutex mutex_;   // guards everything down to the next comment
  TensorTable table_;  // the driver reads what has arrived without the lock, see TensorTable::arrived()
  Join join_;
  Effects effects_;  // empty but between a call of the two above and apply_effects()
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

  // Scratch of the driver.
  LogEvent event_;
  std::vector<Operation*> batch_;

  std::thread background_;
  std::thread device_ending_;  // of a member alone, which has no background thread; see abort_raised()
};

}  // namespace horovod
