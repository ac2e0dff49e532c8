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

  // False, and nothing has changed, while another operation of that name is in flight.
  bool submit(const std::shared_ptr<Submission>& submission, Effects& effects);
  // The driver has run its batch.
  void ran(Submission& submission, Effects& effects) { complete(submission, {}, effects); }
  // The order log has withdrawn its arrival.
  void withdrawn(Submission& submission, Effects& effects);
  // Looks for what is in flight for long, whoever waits for it, if anybody does. To be called now and then.
  void watch(int64_t now_us, Effects& effects);

  // The coordinator gives what is announced as `name` its id. False where nothing is.
  bool plan(const std::string& name, TensorId id, Effects& effects);
  // The coordinator refuses what is announced, or runs already, as `name`.
  void refuse(const std::string& name, const Status& why, Effects& effects);
  // The coordinator wants these ids back. They are answered together, when all that has arrived under them has run or
  // is withdrawn.
  void recall(const std::vector<TensorId>& ids, Effects& effects);

  // Nothing more can be agreed: what has not arrived ends with `why`, the rest is withdrawn unless it is agreed.
  void close(const Status& why, Effects& effects);
  // The epoch is over: everything ends. The caller says how, in the status of what is complete.
  void end(Effects& effects);

  // What has arrived in the log under an id, or null. The only method that the driver calls without the lock.
  //
  // Set (release) before the effect `arrive`, cleared when the operation has run or is withdrawn. Read (acquire) by the
  // driver, which alone ends what has arrived: what it finds here stays while it looks, so the log may ask the fuse
  // rule under a lock of its own.
  Submission* arrived(TensorId id) const { return id < kMaxIds ? by_id_[id].load(std::memory_order_acquire) : nullptr; }

  const std::unordered_map<Submission*, std::shared_ptr<Submission>>& in_flight() const { return in_flight_; }
  // Appends what is in flight and does not run. False where an operation is being withdrawn.
  bool unfinished(std::vector<Unfinished>& found) const;
  // Something in flight that does not stand for long, or null.
  std::shared_ptr<Submission> any_awaited() const;
  size_t known() const { return lanes_.size(); }

  // -- for Join, see join.h
  // An operation of the table's own in a lane that has an id and nothing active.
  void start(const std::shared_ptr<Submission>& submission, Lane& lane, Effects& effects);
  // It has run or is withdrawn: it no longer stands in the lane's way, and the lane's id may be free.
  void settle(Submission& submission, Effects& effects);
  void start_again(Submission& settled, Effects& effects) { begin(settled, effects); }
  void drop(Submission& settled);
  // Asks for an arrival to be withdrawn, unless that has been asked; it then ends with `why`.
  void withdraw(Submission& submission, const Status& why, Effects& effects);
  // Ends what waits in its lane for an earlier operation.
  void complete_waiting(Submission& submission, Status why, Effects& effects);
  // What the others have agreed to run as `id`, at once or when its lane's earlier id is free.
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
