// The operations of one member: which are in flight, under which ids they run, and what the order log and the
// coordinator have yet to say about them.
//
// Life of an operation: submit() finds its lane. A lane that has an id arrives in the order log at once; a new one is
// announced to the coordinator, whose plan gives it an id. It ends when the log says that every member has arrived and
// the batch has run, when the log has withdrawn its arrival, or when the coordinator refuses it.
//
// Pure: no thread, lock, log or clock. What is to be done is appended to `effects`, which the caller owns, uses again,
// and carries out at once. The caller's lock guards everything but arrived().
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/blocked_report.h"
#include "engine/lane_table.h"

namespace horovod {

class TensorTable {
 public:
  explicit TensorTable(int process_set) : process_set_(process_set), lane_of_id_(kMaxIds, nullptr), by_id_(kMaxIds) {}

  // Takes up an operation. While another operation of its name is in flight: False, and nothing has changed.
  bool submit(const std::shared_ptr<Submission>& submission, Effects& effects);
  // To be called when the driver has run the batch of the operation.
  void ran(Submission& submission, Effects& effects) { complete(submission, {}, effects); }
  // To be called when the order log has withdrawn the arrival of the operation.
  void withdrawn(Submission& submission, Effects& effects);
  // Looks for operations that are in flight for long, whether a thread waits for them or not. To be called now and
  // then.
  void watch(int64_t now_us, Effects& effects);

  // The coordinator's id for the operation that is announced as `name`. False where there is none.
  bool plan(const std::string& name, TensorId id, Effects& effects);
  // The coordinator refuses the operation that is announced as `name`, or that runs already under that name.
  void refuse(const std::string& name, const Status& why, Effects& effects);
  // The coordinator wants these ids back. They are answered together, when all that has arrived under them has run or
  // is withdrawn.
  void recall(const std::vector<TensorId>& ids, Effects& effects);

  // Nothing more can be agreed: operations that have not arrived end with `why`, arrivals are withdrawn unless agreed.
  void close(const Status& why, Effects& effects);
  // The epoch is over: every operation ends. The caller sets the status of those that the effects complete.
  void end(Effects& effects);

  // The operation that has arrived in the log under an id, or null. The driver calls this method without the lock, and
  // no other one.
  //
  // Set (release) before the effect `arrive`, cleared when the operation has run or is withdrawn. Read (acquire) by the
  // driver. Only the driver ends operations that have arrived, so what it finds here stays valid while it reads, and
  // the log may ask the fuse rule under a lock of its own.
  Submission* arrived(TensorId id) const { return id < kMaxIds ? by_id_[id].load(std::memory_order_acquire) : nullptr; }

  const std::unordered_map<Submission*, std::shared_ptr<Submission>>& in_flight() const { return in_flight_; }
  // Appends the operations that are in flight and do not run. False where an operation is being withdrawn.
  bool unfinished(std::vector<Unfinished>& found) const;
  // Appends how many unnamed operations of each kind were started.
  void unnamed(std::vector<Unnamed>& found) const;
  // An operation in flight, but none that may take long (Submission::unawaited); or null.
  std::shared_ptr<Submission> any_awaited() const;
  size_t known() const { return lanes_.size(); }

  // -- for Join, see join.h
  // Starts an operation of the table's own in a lane that has an id and no active operation.
  void start(const std::shared_ptr<Submission>& submission, Lane& lane, Effects& effects);
  // The operation has run or is withdrawn, so the lane may go on to the next one, and its id may be free.
  void settle(Submission& submission, Effects& effects);
  void start_again(Submission& settled, Effects& effects) { begin(settled, effects); }
  void drop(Submission& settled);
  // Asks the log to withdraw an arrival, unless it was asked already. The operation then ends with `why`.
  void withdraw(Submission& submission, const Status& why, Effects& effects);
  // Ends an operation that waits in its lane for an earlier one.
  void complete_waiting(Submission& submission, Status why, Effects& effects);
  // Starts what the others have agreed to run as `id`, at once or when the earlier id of its lane is free.
  void learn(TensorId id, const OpSpec& spec);
  void forget_unnamed();
  const std::vector<Lane*>& lane_of_id() const { return lane_of_id_; }

 private:
  void begin(Submission& submission, Effects& effects);
  void complete(Submission& submission, Status status, Effects& effects);
  void free_id(Lane& lane, Effects& effects);
  void take_next_id(Lane& lane);
  void answer_recalls(Effects& effects);

  const int process_set_;
  std::vector<Submission*> late_;  // used inside watch() only; a member so that its memory is allocated once
  LaneTable lanes_;
  std::unordered_map<std::string, Submission*> announced_;  // by name: they wait for the coordinator's plan
  std::unordered_map<Submission*, std::shared_ptr<Submission>> in_flight_;  // keeps the submissions alive
  std::vector<Lane*> lane_of_id_;
  std::vector<std::atomic<Submission*>> by_id_;  // see arrived()
  // A recall is answered in one message: `recalled_` are the ids that are free by now, and the answer waits until
  // `recalls_open_`, the lanes whose recalled id is still in use, is 0.
  std::vector<TensorId> recalled_;
  size_t recalls_open_ = 0;
};

}  // namespace horovod
