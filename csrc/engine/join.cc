#include "engine/join.h"

#include <algorithm>

namespace horovod {
namespace {

// "Allgather" for "ALLGATHER".
std::string capitalized_name_of(OpType type) {
  std::string name = name_of(type);
  for (size_t i = 1; i < name.size(); ++i) name[i] = static_cast<char>(name[i] - 'A' + 'a');
  return name;
}

}  // namespace

void Join::begin(Effects& effects) {
  now_.joined = true;
  tell(false, effects);
}

void Join::tell(bool without_zeros, Effects& effects) {
  effects.push_back({.kind = Effect::tell_joined, .round = round_, .without_zeros = without_zeros});
}

Status Join::refusal(const OpSpec& spec) const {
  if (now_.joined) {
    return {Code::precondition, error_code::not_with_join,
            "Requested to submit " + spec.name + " on rank " + std::to_string(rank_) +
                ", which has called hvd.join(); it takes part in nothing of its own in the global "
                "process set until hvd.join() has returned."};
  }
  if (spec.type == OpType::allreduce || now_.others.empty()) return {};
  return {Code::precondition, error_code::not_with_join,
          capitalized_name_of(spec.type) + " is not supported with Join at this time. " + now_.others + " It was " +
              spec.name + "."};
}

void Join::apply(const std::vector<int>& ranks, JoinPhase phase, const std::string& sentence, Effects& effects) {
  if (phase == JoinPhase::over) {
    ++round_;
    last_rank_ = ranks.back();
    now_ = {};
    // Members number unnamed operations, and this one did not count those of others. None of them is in flight, so all
    // begin anew at the same point; the coordinator recalls the ids. Operations that nobody awaits have names and stay.
    table_.forget_unnamed();
    return;
  }
  now_.others = sentence;
  refuse_others(effects);
  if (phase == JoinPhase::ending) return withdraw_zeros(effects);
  if (std::find(ranks.begin(), ranks.end(), rank_) == ranks.end()) return;
  now_.contributes = true;
  contribute(effects);
}

// A member has joined, so an operation under way that is no allreduce can't become complete any more. What the joined
// member itself had started was complete before it joined, so no operation is refused in which it takes part.
// Operations that are announced get the coordinator's refusal.
void Join::refuse_others(Effects& effects) {
  std::vector<Submission*> waiting;
  for (const auto& [submission, owner] : table_.in_flight()) {
    if (submission->zeros || submission->spec.type == OpType::allreduce) continue;
    if (submission->lane->active != submission) {
      waiting.push_back(submission);
    } else if (submission->lane->has_arrived(submission)) {
      table_.withdraw(*submission, refusal(submission->spec), effects);
    }
  }
  for (Submission* const submission : waiting) {
    table_.complete_waiting(*submission, refusal(submission->spec), effects);
  }
}

void Join::plan(TensorId id, const OpSpec& spec, Effects& effects) {
  if (!now_.joined) return;  // the join has failed meanwhile, or the communicator is closed
  table_.learn(id, spec);
  contribute(effects);
}

void Join::recall(const std::vector<TensorId>& ids, Effects& effects) {
  table_.recall(ids, effects);
  contribute(effects);  // zeros to lanes that have taken their next id
}

// Contributes zeros to every allreduce that has an id and no zeros of this member yet.
void Join::contribute(Effects& effects) {
  if (!now_.contributes) return;
  for (Lane* const lane : table_.lane_of_id()) {
    if (!lane || lane->id == Lane::kNoId || lane->active || lane->spec.type != OpType::allreduce) continue;
    const auto zeros = std::make_shared<Submission>();
    zeros->zeros = true;
    zeros->spec = lane->spec;
    if (!make_zeros_(*zeros)) return;
    ++zeros_;
    table_.start(zeros, *lane, effects);
  }
}

void Join::ran(Submission& submission, Effects& effects) {
  table_.ran(submission, effects);
  contribute(effects);  // zeros to the next run of the same allreduce
}

void Join::settled(Submission& zeros, Effects& effects) {
  Lane& lane = *zeros.lane;
  table_.settle(zeros, effects);
  zeros.running.store(false, std::memory_order_relaxed);
  zeros.withdrawal.reset();
  if (now_.contributes && lane.id != Lane::kNoId) return table_.start_again(zeros, effects);
  --zeros_;
  table_.drop(zeros);
  if (now_.ending && zeros_ == 0) tell(true, effects);
}

void Join::withdraw_zeros(Effects& effects) {
  now_.contributes = false;
  now_.ending = true;
  if (zeros_ == 0) return tell(true, effects);
  for (const auto& [submission, owner] : table_.in_flight()) {
    if (submission->zeros) table_.withdraw(*submission, {Code::aborted, "All ranks have joined."}, effects);
  }
}

}  // namespace horovod
