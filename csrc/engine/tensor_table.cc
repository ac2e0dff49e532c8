#include "engine/tensor_table.h"

#include <algorithm>
#include <utility>

#include "base/limits.h"

namespace horovod {

bool TensorTable::submit(const std::shared_ptr<Submission>& submission, Effects& effects) {
  if (!lanes_.enter(*submission)) return false;
  in_flight_.emplace(submission.get(), submission);
  if (submission->lane->active) {
    submission->lane->waiting.push_back(submission.get());
  } else {
    begin(*submission, effects);
  }
  return true;
}

void TensorTable::begin(Submission& submission, Effects& effects) {
  Lane& lane = *submission.lane;
  lane.active = &submission;
  if (lane.id == Lane::kNoId) {
    announced_[submission.announced_name()] = &submission;
    effects.push_back({.kind = Effect::announce, .submission = &submission});
    return;
  }
  by_id_[lane.id].store(&submission, std::memory_order_release);
  effects.push_back({.kind = Effect::arrive, .id = lane.id, .submission = &submission});
}

void TensorTable::settle(Submission& submission, Effects& effects) {
  Lane& lane = *submission.lane;
  if (lane.active != &submission) return;
  lane.active = nullptr;
  if (lane.id == Lane::kNoId) return;
  by_id_[lane.id].store(nullptr, std::memory_order_relaxed);
  if (lane.recalled) free_id(lane, effects);
}

void TensorTable::complete(Submission& submission, Status status, Effects& effects) {
  Lane& lane = *submission.lane;
  settle(submission, effects);
  submission.status = std::move(status);
  effects.push_back({.kind = Effect::complete, .done = std::move(in_flight_.extract(&submission).mapped())});
  if (!lane.active && !lane.waiting.empty()) {
    Submission* const next = lane.waiting.front();
    lane.waiting.pop_front();
    begin(*next, effects);
  }
  lanes_.leave(submission);
}

void TensorTable::withdrawn(Submission& submission, Effects& effects) {
  Status why = std::exchange(submission.withdrawal, std::nullopt).value_or(Status());
  if (!why.ok()) return complete(submission, std::move(why), effects);
  settle(submission, effects);
  begin(submission, effects);
}

// A thousand gradients may wait for one late rank, and the coordinator needs to know of few of them to say which rank
// that is: of those for which a thread waits, and of the oldest.
void TensorTable::watch(int64_t now_us, Effects& effects) {
  late_.clear();
  for (const auto& [submission, owner] : in_flight_) {
    if (submission->seen_us == 0) submission->seen_us = now_us;
    const bool late = now_us - submission->seen_us > limits::kBlockedAfterUs;
    if (late && !submission->zeros && !submission->unawaited && !submission->running.load(std::memory_order_relaxed))
      late_.push_back(submission);
  }
  const auto middle = late_.begin() + static_cast<ptrdiff_t>(std::min(late_.size(), limits::kMostTold));
  std::partial_sort(late_.begin(), middle, late_.end(),
                    [](const Submission* a, const Submission* b) { return a->number < b->number; });
  for (auto one = late_.begin(); one != late_.end(); ++one) {
    Submission& submission = **one;
    if (one >= middle && submission.waited_since_us == 0) continue;
    if (now_us - submission.reported_us <= limits::kBlockedAgainUs) continue;
    submission.reported_us = now_us;
    effects.push_back({.kind = Effect::tell_blocked, .submission = &submission});
  }
}

bool TensorTable::plan(const std::string& name, TensorId id, Effects& effects) {
  const auto found = announced_.extract(name);
  if (!found) return false;
  Submission& submission = *found.mapped();
  submission.lane->id = id;
  lane_of_id_[id] = submission.lane;
  begin(submission, effects);
  return true;
}

void TensorTable::refuse(const std::string& name, const Status& why, Effects& effects) {
  if (const auto found = announced_.extract(name)) return complete(*found.mapped(), why, effects);
  // The operation may have arrived under an id already, when the ranks turn out to wait for different operations.
  for (const auto& [submission, owner] : in_flight_) {
    if (submission->zeros || submission->announced_name() != name) continue;
    if (submission->lane->active == submission) withdraw(*submission, why, effects);
    return;
  }
}

void TensorTable::withdraw(Submission& submission, const Status& why, Effects& effects) {
  const bool is_under_way = submission.withdrawal.has_value();
  // An error counts although the operation was to be announced again.
  if (!is_under_way || submission.withdrawal->ok()) submission.withdrawal = why;
  if (is_under_way) return;
  effects.push_back({.kind = Effect::withdraw, .id = submission.lane->id});
}

void TensorTable::recall(const std::vector<TensorId>& ids, Effects& effects) {
  ++recalls_open_;  // one more for this call, so that ids which are free at once are answered with the others
  for (const TensorId id : ids) {
    Lane* const lane = lane_of_id_[id];
    if (!lane) {
      recalled_.push_back(id);
    } else if (lane->next_id == id) {  // not in use yet
      lane_of_id_[id] = nullptr;
      lane->next_id = Lane::kNoId;
      recalled_.push_back(id);
    } else if (!lane->recalled) {  // otherwise the coordinator repeats itself
      lane->recalled = true;
      ++recalls_open_;
      if (lane->active) {
        withdraw(*lane->active, {}, effects);
      } else {
        free_id(*lane, effects);
        lanes_.forget_if_unused(*lane);
      }
    }
  }
  --recalls_open_;
  answer_recalls(effects);
}

void TensorTable::free_id(Lane& lane, Effects& effects) {
  recalled_.push_back(lane.id);
  lane_of_id_[lane.id] = nullptr;
  lane.id = Lane::kNoId;
  lane.recalled = false;
  --recalls_open_;
  take_next_id(lane);
  answer_recalls(effects);
}

void TensorTable::answer_recalls(Effects& effects) {
  if (recalls_open_ > 0 || recalled_.empty()) return;
  effects.push_back({.kind = Effect::recalled, .ids = std::exchange(recalled_, {})});
}

void TensorTable::close(const Status& why, Effects& effects) {
  announced_.clear();
  std::vector<Submission*> not_arrived;
  for (const auto& [submission, owner] : in_flight_) {
    submission->lane->waiting.clear();  // so that none of them begins when another one ends
    if (!submission->lane->has_arrived(submission)) not_arrived.push_back(submission);
  }
  for (Submission* const submission : not_arrived) complete(*submission, why, effects);
  for (const auto& [submission, owner] : in_flight_) {
    withdraw(*submission, why, effects);
    submission->withdrawal = why;  // also if it was to be announced again
  }
}

void TensorTable::end(Effects& effects) {
  announced_.clear();
  for (auto& [submission, owner] : in_flight_) {
    submission->lane->active = nullptr;
    submission->lane->waiting.clear();
    if (submission->entry) submission->entry->in_flight = false;
    effects.push_back({.kind = Effect::complete, .done = std::move(owner)});
  }
  in_flight_.clear();
  for (std::atomic<Submission*>& submission : by_id_) submission.store(nullptr, std::memory_order_relaxed);
}

std::shared_ptr<Submission> TensorTable::any_awaited() const {
  for (const auto& [submission, owner] : in_flight_) {
    if (!submission->unawaited) return owner;
  }
  return nullptr;
}

bool TensorTable::unfinished(std::vector<Unfinished>& found) const {
  bool settled = true;
  for (const auto& [submission, owner] : in_flight_) {
    if (submission->withdrawal) settled = false;
    if (submission->zeros || submission->running.load(std::memory_order_acquire)) continue;
    const bool awaited = submission->waited_since_us != 0 && !submission->by_graph;
    found.push_back({submission->number, process_set_, submission->announced_name(), awaited, submission->by_graph});
  }
  return settled;
}

void TensorTable::unnamed(std::vector<Unnamed>& found) const {
  lanes_.unnamed([&](const std::string& name, uint64_t count) { found.push_back({process_set_, name, count}); });
}

void TensorTable::start(const std::shared_ptr<Submission>& submission, Lane& lane, Effects& effects) {
  submission->lane = &lane;
  ++lane.users;
  in_flight_.emplace(submission.get(), submission);
  begin(*submission, effects);
}

void TensorTable::drop(Submission& settled) {
  const auto owner = in_flight_.extract(&settled);
  lanes_.leave(settled);
}

void TensorTable::complete_waiting(Submission& submission, Status why, Effects& effects) {
  std::erase(submission.lane->waiting, &submission);
  complete(submission, std::move(why), effects);
}

void TensorTable::learn(TensorId id, const OpSpec& spec) {
  if (lane_of_id_[id]) return;
  Lane& lane = lanes_.learn(spec);
  if (lane.next_id != Lane::kNoId) lane_of_id_[lane.next_id] = nullptr;
  lane.next_id = id;
  lane_of_id_[id] = &lane;
  take_next_id(lane);
}

void TensorTable::take_next_id(Lane& lane) {
  if (lane.next_id == Lane::kNoId || lane.id != Lane::kNoId || lane.active) return;
  lane.id = std::exchange(lane.next_id, Lane::kNoId);
}

void TensorTable::forget_unnamed() {
  for (const TensorId id : lanes_.forget_unnamed()) lane_of_id_[id] = nullptr;
}

}  // namespace horovod
