// What the coordinator says about operations: their ids, that the ranks do not agree, that ids are taken back, that a
// peer has left.
#include <algorithm>

#include "base/clock.h"
#include "engine/communicator.h"

namespace horovod {
namespace {

constexpr int64_t kServeUs = 2'000'000;  // how long whoever is asked listens to members that take arrivals back

}  // namespace

void Communicator::apply_plan(const std::string& name, TensorId id, const OpSpec* operation) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (id >= kMaxIds) return refuse_id("gave " + name, id);
  const auto found = announced_.find(name);
  if (found == announced_.end()) {
    if (!operation || !joining_.mine || !ended_.ok() || lane_of_id_[id]) return;  // failed or closed meanwhile
    Lane& lane = learn(name, *operation);
    lane.next_id = id;
    take_next_id(lane);
    return;
  }
  Submission& submission = *found->second;
  announced_.erase(found);
  submission.lane->id = id;
  lane_of_id_[id] = submission.lane;
  begin(submission);
}

// This rank can't do what the others now do with the id, so the epoch ends.
void Communicator::refuse_id(const std::string& what, TensorId id) {
  abort_.raise({Code::internal, "The coordinator " + what + " an id that there is not: " + bad_id(id).message() +
                                    " Use one release of horovod on all hosts."});
  if (log_) log_->wake();
}

// Between hosts a member that takes an arrival back asks the sequencer, or one of two asks the other, or it asks the
// rank that speaks for its host, and who is asked may have nothing pending. Whatever makes members do so (an error, a
// recall) is told to all of them by the coordinator, so it knows to listen.
void Communicator::serve_peers() {
  if (!mesh_ || (rank_ != 0 && size() > 2 && (!hierarchy_ || (region_ && region_->rank() > 0)))) return;
  serving_until_us_ = now_us() + kServeUs;
  background_wanted_.notify_one();
}

void Communicator::apply_error(const std::string& name, const std::string& sentence) {
  const std::lock_guard<std::mutex> lock(mutex_);
  serve_peers();
  const Status status(Code::precondition, sentence);
  if (const auto found = announced_.find(name); found != announced_.end()) {
    Submission& submission = *found->second;
    announced_.erase(found);
    complete(submission, status);
    driver_changed_.notify_all();
    if (log_) log_->wake();
    return;
  }
  // It may run under an id already (the ranks turned out to wait for different things): take it back.
  for (const auto& [submission, owner] : in_flight_) {
    if (submission->zeros) continue;
    if (submission->announced_name() != name) continue;
    if (submission->arrived && !submission->withdrawing) {
      submission->withdrawing = true;
      submission->withdrawn_status = status;
      if (Status failed = log_->withdraw(submission->lane->id); !failed.ok()) abort_.raise(failed);
    }
    return;
  }
}

void Communicator::apply_recall(const std::vector<TensorId>& ids) {
  const std::lock_guard<std::mutex> lock(mutex_);
  serve_peers();
  for (TensorId id : ids) {
    if (id >= kMaxIds) return refuse_id("recalls", id);
    ++recalls_open_;
    Lane* lane = lane_of_id_[id];
    if (lane && lane->active && lane->active->arrived) {
      Submission& submission = *lane->active;
      if (submission.withdrawing && submission.withdrawn_status.ok()) {  // told again
        --recalls_open_;
        continue;
      }
      if (!submission.withdrawing) {
        submission.withdrawing = true;
        if (Status failed = log_->withdraw(id); !failed.ok()) abort_.raise(failed);
        continue;  // settled when the log answers
      }
    }
    if (lane) {
      finish_recall(*lane);
      take_next_id(*lane);
      forget_if_unused(*lane);
    } else {
      recalled_.push_back(id);
      --recalls_open_;
    }
  }
  if (recalls_open_ == 0 && !recalled_.empty()) {
    OutboxItem item;
    item.kind = OutboxItem::recalled;
    item.process_set = process_set_;
    item.ids.swap(recalled_);
    outbox_.push(std::move(item));
  }
}

// The lane's id is free on this member.
void Communicator::finish_recall(Lane& lane) {
  recalled_.push_back(lane.id);
  lane_of_id_[lane.id] = nullptr;
  lane.id = Lane::kNoId;
  if (recalls_open_ > 0 && --recalls_open_ == 0) {
    OutboxItem item;
    item.kind = OutboxItem::recalled;
    item.process_set = process_set_;
    item.ids.swap(recalled_);
    outbox_.push(std::move(item));
  }
}

size_t Communicator::known() {
  const std::lock_guard<std::mutex> lock(mutex_);
  size_t lanes = retired_.size();
  for (const auto& [name, entry] : names_) {
    for (const std::unique_ptr<NameEntry::Variant>& variant : entry.variants) lanes += variant->lanes.size();
  }
  return lanes;
}

// An operation of the lane is over.
void Communicator::release(Lane& lane) {
  --lane.users;
  forget_if_unused(lane);
}

// What has neither an id nor an operation is like what never was: the next operation of that name is announced anew.
// All members lose an id at the same time, by a recall, so ids bound what is known. Unnamed operations are counted,
// which only make_room() may end.
void Communicator::forget_if_unused(Lane& lane) {
  if (lane.users > 0 || lane.id != Lane::kNoId || lane.next_id != Lane::kNoId) return;
  if (retired_.erase(&lane) > 0) return;
  const auto found = names_.find(lane.spec.name);
  if (found == names_.end() || found->second.unnamed) return;
  std::vector<std::unique_ptr<NameEntry::Variant>>& variants = found->second.variants;
  std::erase_if(variants, [&](const std::unique_ptr<NameEntry::Variant>& one) { return one->lanes[0].get() == &lane; });
  if (variants.empty()) names_.erase(found);
}

// Forgets the signature that was used longest ago. All members do so at the same operation, since they start unnamed
// operations in the same order; what is still in use of it is kept until it is not, and its ids until their recall.
void Communicator::make_room(NameEntry& entry) {
  const auto oldest = std::min_element(entry.variants.begin(), entry.variants.end(),
                                       [](const auto& a, const auto& b) { return a->latest < b->latest; });
  for (std::unique_ptr<Lane>& lane : (*oldest)->lanes) {
    if (lane->users == 0 && lane->id == Lane::kNoId && lane->next_id == Lane::kNoId) continue;
    const Lane* const key = lane.get();
    retired_.emplace(key, std::move(lane));
  }
  entry.variants.erase(oldest);
}

void Communicator::answer_withdrawn(TensorId id) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Submission* const submission = by_id_[id].exchange(nullptr, std::memory_order_acquire);
  if (!submission) return;
  submission->arrived = submission->withdrawing = false;
  if (submission->zeros) {
    if (submission->withdrawn_status.ok()) finish_recall(*submission->lane);
    complete_zeros(*submission);
    return;
  }
  if (!submission->withdrawn_status.ok()) {
    complete(*submission, submission->withdrawn_status);
    driver_changed_.notify_all();
    return;
  }
  finish_recall(*submission->lane);
  announce(*submission);
}

void Communicator::peer_left(int member, const std::string& sentence) {
  if (!log_ || member == rank_) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!left_sentence_.empty()) return;
  left_sentence_ = sentence;
  left_since_us_ = now_us();
}

}  // namespace horovod
