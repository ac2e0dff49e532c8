// The operations of one process set on this member. The tensor table decides what is to be done; a Communicator does
// it: it talks to the order log and the coordinator, and wakes the callers that wait.
//
// Locks, outermost first: that of the driver, which guards the tables as well, and that of the order log. No lock is
// held while a batch runs or a thread sleeps in the log.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/abort.h"
#include "base/config.h"
#include "collectives/backend.h"
#include "collectives/data_plane.h"
#include "collectives/hierarchical/collectives.h"
#include "collectives/operation.h"
#include "engine/blocked_report.h"
#include "engine/device_work.h"
#include "engine/driver.h"
#include "engine/join.h"
#include "engine/order_log.h"
#include "engine/outbox.h"
#include "engine/tensor_table.h"
#include "engine/timeline.h"
#include "transport/mesh.h"
#include "transport/region.h"

namespace horovod {

class Communicator final : private Driver::Work {
 public:
  // on_abort: called from a driver when it has seen the abort signal, with no lock held; the epoch is over for every
  // communicator of the process, not just for this one.
  Communicator(Members members, const Config& config, AbortSignal& abort, Outbox& outbox, Timeline& timeline,
               std::function<void()> on_abort);
  ~Communicator() override;

  // In a world of more than one member, exactly one of these is called before the first submit().
  void attach(std::unique_ptr<Region> region);
  // hosts: given where some members share memory. `region` then holds the members of this host; it is null where this
  // member is alone on its host.
  void attach(std::unique_ptr<Mesh> mesh, std::unique_ptr<Backend> backend = nullptr,
              std::optional<Hosts> hosts = std::nullopt, std::unique_ptr<Region> region = nullptr);

  int rank() const { return members_.rank; }
  int size() const { return members_.size(); }
  const std::vector<int>& ranks() const { return members_.ranks; }
  const std::vector<int>& placement() const { return members_.placement; }
  // Adds this communicator's counters to those in the argument.
  void add_counts(std::map<std::string, uint64_t>& counts) const;
  // The number of operations that have been submitted and are not done.
  int64_t pending() {
    const std::lock_guard<std::mutex> lock(driver_.mutex());
    return static_cast<int64_t>(table_.in_flight().size());
  }
  // The number of kinds of operations (names and signatures) that are remembered.
  size_t known() {
    const std::lock_guard<std::mutex> lock(driver_.mutex());
    return table_.known();
  }
  // Adds the operations that were submitted and do not run yet, all as they are at one moment.
  void add_to(BlockedReport& report);

  // What runs operations on a device. Its use() is called before each operation on a device.
  DeviceWork& device() { return device_; }

  Status submit(const std::shared_ptr<Submission>& submission, Start start);
  // Drives or waits up to timeout_us; true when the operation is done.
  bool wait(Submission& submission, int64_t timeout_us);
  // Says that no thread waits for the operation any more. False where it is done; `on_done` is then not called.
  bool tell_when_done(Submission& submission, OnDone on_done, Completions& completions);

  // spec: null, or the operation that runs as `id`, for a member that has joined and may not know it.
  void apply_plan(const std::string& name, TensorId id, const OpSpec* spec = nullptr);
  void apply_error(const std::string& name, const std::string& sentence) { apply_errors({{name, sentence}}, {}); }
  // The coordinator refuses these operations, by name, and recalls ids that they had. All of it happens at once: a
  // thread that is told of its error finds no such id to start another operation under, while another rank waits there
  // still and has not heard of its own error.
  void apply_errors(const std::vector<std::pair<std::string, std::string>>& errors, const std::vector<TensorId>& ids);
  void apply_recall(const std::vector<TensorId>& ids);
  // The same for those of the ids under which nothing is in flight; returns the others.
  std::vector<TensorId> apply_recall_of_idle(const std::vector<TensorId>& ids);
  // sentence: tells the user why nothing but allreduces can run.
  void apply_join(uint32_t round, const std::vector<int>& ranks, JoinPhase phase, const std::string& sentence);
  // left: a rank of the world, which need not be a member of this process set.
  void peer_left(int left, const std::string& sentence);

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
  Status close(const std::string& farewell,
               const std::string& why = coded(error_code::shut_down, "Horovod has been shut down."));
  // Gives away connections by Mesh::hand_over(). To be called after close(), if that has not failed.
  std::vector<KeptSocket> hand_over(bool keep) { return mesh_ ? mesh_->hand_over(keep) : std::vector<KeptSocket>(); }

 private:
  // -- Driver::Work
  bool needs_driver() override;
  DeviceBackend* busy_device() override;
  Status overdue(int64_t now_us) override;
  Status run(const LogEvent& batch) override;
  void withdrawn(TensorId id) override;
  void end(const Status& why) override;
  bool watches_device() override { return device_.backend() != nullptr; }
  void tend_device() override;
  void watch(int64_t now_us) override;
  void abort_device() override { device_.end(false); }
  void linger() override;
  void set_patient(bool patient) override;

  void make_mesh_log();
  size_t fuse(const TensorId* ids, size_t count);
  Status look_at_peers();
  Status submit_alone(Submission& submission);
  // Carries out effects_. Called with the lock held. True when operations have ended.
  bool apply_effects();
  void tell_coordinator(OutboxItem::Kind kind, const Submission& submission);
  bool make_zeros(Submission& zeros);
  bool is_pending() const { return !table_.in_flight().empty(); }
  void serve_peers();
  void refuse_id(const std::string& what, TensorId id);
  void recall(const std::vector<TensorId>& ids);
  void fail_locked(const Status& status);
  void give_up_locked();
  Status close_alone(const std::string& why);
  Status with_context(const Status& status, const Submission& submission) const;

  const Members members_;
  const Config config_;
  AbortSignal& abort_;
  Outbox& outbox_;
  Timeline& timeline_;
  const std::function<void()> on_abort_;
  std::unique_ptr<Mesh> mesh_;
  std::unique_ptr<Region> region_;        // of all members; beside a mesh, of the members of this host
  std::unique_ptr<Hierarchy> hierarchy_;  // uses mesh_ and region_
  std::unique_ptr<Backend> backend_;      // uses mesh_
  std::unique_ptr<OrderLog> log_;         // null in a world of one
  DataPlane plane_;
  DeviceWork device_;  // uses all of the above
  struct {
    std::atomic<uint64_t> announced{0}, submitted{0}, agreed{0}, batches{0}, bytes{0};  // statistics; any order
  } counters_;
  std::vector<Operation*> batch_;  // used by the driver only

  Driver driver_;      // its lock guards everything below
  TensorTable table_;  // except what the driver reads without the lock, see TensorTable::arrived()
  Join join_;
  uint64_t executed_ = 0;         // operations that have run; equal to counters_.agreed while no batch runs
  Effects effects_;               // holds something only between a call of table_ or join_ and apply_effects()
  int64_t serving_until_us_ = 0;  // a thread drives until then, as peers may ask to withdraw arrivals
  Status closed_;                 // not ok once close() was called
  Status ended_;                  // not ok once the epoch is over
  Status stuck_;                  // not ok once close() has given up
  std::vector<std::shared_ptr<Submission>> stuck_operations_;  // in flight when close() gave up
  std::string left_sentence_;                                  // the coordinator's sentence about a peer that left
  int64_t left_since_us_ = 0;
  std::thread device_ending_;  // of the only member of a set, which has no background thread; see abort_raised()
};

}  // namespace horovod
