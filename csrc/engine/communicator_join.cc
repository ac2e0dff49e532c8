// hvd.join(): a member without data contributes zeros to the allreduces of the others until all members have joined.
//
// It arrives in the order log with zeros for every allreduce that has an id, ahead of the others and again after each
// run; so the others notice nothing, and no message is needed for what is known. A name that is new to the joined
// member comes from the coordinator, which counts it as announced. Nothing else can run meanwhile.
//
// Whether everybody has joined is the coordinator's to say (coordinator/core/join.py); the last member never
// contributes zeros. Before anybody goes on all zeros are taken back, because they would be taken for arrivals of the
// next step.
#include <algorithm>
#include <cstdlib>

#include "engine/communicator.h"

namespace horovod {
namespace {

// "Allgather" of ALLGATHER.
std::string capitalized_name_of(OpType type) {
  std::string name = name_of(type);
  for (size_t i = 1; i < name.size(); ++i) name[i] = static_cast<char>(name[i] - 'A' + 'a');
  return name;
}

}  // namespace

Status Communicator::join(int64_t timeout_us, int64_t& ticket, int& last_rank) {
  last_rank = -1;
  if (!log_) {
    last_rank = ranks_[rank_];
    return {};
  }
  const int64_t deadline = now_us() + timeout_us;
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    if (ticket != kNoTicket && joining_.round > ticket) {
      last_rank = joining_.last_rank;
      return {};
    }
    if (!ended_.ok() || closed_) {
      const std::string why = ended_.ok() ? closed_why_ : ended_.message();
      return {ended_.ok() ? Code::aborted : ended_.code(),
              why + " (Rank " + std::to_string(ranks_[rank_]) + " was in hvd.join().)"};
    }
    const int64_t left = deadline - now_us();
    if (left <= 0) return {};
    if (ticket == kNoTicket && !joining_.mine && !in_flight_.empty()) {
      const std::shared_ptr<Submission> own = in_flight_.begin()->second;
      lock.unlock();
      wait(*own, left);  // an error is told to whoever collects its result
      lock.lock();
      continue;
    }
    if (ticket == kNoTicket) {
      ticket = joining_.round;
      if (!joining_.mine) {
        joining_.mine = true;
        tell_joined(false);
        background_wanted_.notify_one();
      }
    }
    driver_changed_.wait_for(lock, std::chrono::microseconds(left));
  }
}

void Communicator::tell_joined(bool without_zeros) {
  OutboxItem item;
  item.kind = OutboxItem::join;
  item.round = joining_.round;
  item.without_zeros = without_zeros;
  outbox_.push(std::move(item));
}

void Communicator::apply_join(uint32_t round, const std::vector<int>& ranks, JoinPhase phase,
                              const std::string& sentence) {
  if (!log_) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!ended_.ok() || closed_ || round != joining_.round || ranks.empty()) return;  // over, or told again
  serve_peers();
  if (phase == JoinPhase::over) {
    joining_ = {.round = round + 1, .last_rank = ranks.back()};
    forget_unnamed();
    driver_changed_.notify_all();
    return;
  }
  joining_.others = sentence;
  refuse_others();
  if (phase == JoinPhase::ending) {
    take_zeros_back();
  } else if (!joining_.contributes && std::find(ranks.begin(), ranks.end(), ranks_[rank_]) != ranks.end()) {
    joining_.contributes = true;
    for (Lane* lane : lane_of_id_) {
      if (lane) contribute(*lane);
    }
  }
  background_wanted_.notify_one();
  log_->wake();
}

// What may not be submitted now.
Status Communicator::refusal(const OpSpec& spec) const {
  if (joining_.mine) {
    return {Code::precondition, "Requested to submit " + spec.name + " on rank " + std::to_string(ranks_[rank_]) +
                                    ", which has called hvd.join(); it takes part in nothing of its own in the global "
                                    "process set until hvd.join() has returned."};
  }
  if (spec.type == OpType::allreduce || joining_.others.empty()) return {};
  return {Code::precondition, capitalized_name_of(spec.type) + " is not supported with Join at this time. " +
                                  joining_.others + " It was " + spec.name + "."};
}

// Somebody has joined: what is under way and is no allreduce can't become complete, unless it is already. Whatever that
// member had started was complete before it joined, so nothing is refused that it takes part in. What is announced gets
// the coordinator's refusal.
void Communicator::refuse_others() {
  std::vector<Submission*> refused;
  for (const auto& [submission, owner] : in_flight_) {
    if (submission->zeros || submission->spec.type == OpType::allreduce) continue;
    if (submission->lane->active != submission || submission->arrived) refused.push_back(submission);
  }
  for (Submission* submission : refused) {
    if (submission->lane->active != submission) {
      std::erase(submission->lane->waiting, submission);
      complete(*submission, refusal(submission->spec));
    } else if (!submission->withdrawing) {
      submission->withdrawing = true;
      submission->withdrawn_status = refusal(submission->spec);
      if (Status failed = log_->withdraw(submission->lane->id); !failed.ok()) abort_.raise(failed);
    }
  }
  if (!refused.empty()) driver_changed_.notify_all();
}

// The lane of an operation that the others agreed on without this member.
Lane& Communicator::learn(const std::string& name, const OpSpec& operation) {
  NameEntry& entry = names_[name];
  for (const std::unique_ptr<NameEntry::Variant>& known : entry.variants) {
    if (known->lanes[0]->spec.agrees_with(operation)) return *known->lanes[0];
  }
  entry.variants.push_back(std::make_unique<NameEntry::Variant>());
  std::unique_ptr<Lane>& lane = entry.variants.back()->lanes.emplace_back(std::make_unique<Lane>());
  lane->spec = operation;
  lane->spec.name = name;
  lane->spec.process_set = process_set_;
  return *lane;
}

// The others may have agreed on a new id before this member has taken back its zeros under the old one.
void Communicator::take_next_id(Lane& lane) {
  if (lane.next_id == Lane::kNoId || lane.id != Lane::kNoId || lane.active) return;
  lane.id = lane.next_id;
  lane.next_id = Lane::kNoId;
  lane_of_id_[lane.id] = &lane;
  if (joining_.contributes) contribute(lane);
}

void Communicator::contribute(Lane& lane) {
  if (lane.spec.type != OpType::allreduce || lane.active) return;
  const auto zeros = std::make_shared<Submission>();
  zeros->zeros = true;
  zeros->spec = lane.spec;
  zeros->lane = &lane;
  if (lane.spec.device == DeviceKind::gpu) [[unlikely]] {
    const std::string refused = "Rank " + std::to_string(ranks_[rank_]) +
                                " has joined, but can't contribute zeros to " + lane.spec.name + " on a GPU: ";
    Status failed = device_
                        ? device_->add_zeros(*zeros)
                        : Status(Code::internal,
                                 "it has not used a GPU tensor in this process set, so it does not know on which "
                                 "GPU. Name it: hvd.join(device), or let every rank take part in one operation there "
                                 "before.");
    if (!failed.ok()) {
      abort_.raise({Code::internal, refused + failed.message()});
      return;
    }
    in_flight_.emplace(zeros.get(), zeros);
    ++lane.users;
    ++pending_;
    ++joining_.zeros;
    begin(*zeros);
    return;
  }
  // Each has a result of its own: a batch may send on from there what it has just reduced.
  for (const TensorSpec& tensor : lane.spec.tensors) {
    const int64_t count = tensor.elements();
    const size_t bytes = std::max<size_t>(1, static_cast<size_t>(count) * size_of(tensor.dtype));
    OutputBuffer input, result;
    input.data = {static_cast<std::byte*>(std::calloc(1, bytes)), std::free};  // never written: costs no pages if large
    if (!input.data || !result.allocate(bytes)) {
      abort_.raise({Code::internal, "Rank " + std::to_string(ranks_[rank_]) +
                                        " has joined, but has no memory for the " + std::to_string(bytes) +
                                        " bytes of " + lane.spec.name + "."});
      return;
    }
    zeros->spans.push_back({input.data.get(), result.data.get(), count});
    zeros->outputs.push_back(std::move(input));
    zeros->outputs.push_back(std::move(result));
  }
  in_flight_.emplace(zeros.get(), zeros);
  ++lane.users;
  ++pending_;
  ++joining_.zeros;
  begin(*zeros);
}

// They were reduced, or taken back.
void Communicator::complete_zeros(Submission& zeros) {
  Lane& lane = *zeros.lane;
  if (lane.active == &zeros) {
    lane.active = nullptr;
    if (lane.id != Lane::kNoId) forget(lane.id, zeros);
    if (zeros.withdrawing && lane.id != Lane::kNoId && zeros.withdrawn_status.ok()) finish_recall(lane);
  }
  zeros.running.store(false, std::memory_order_relaxed);
  zeros.arrived = zeros.withdrawing = false;
  if (joining_.contributes && lane.id != Lane::kNoId) {
    begin(zeros);
    return;
  }
  --pending_;
  --joining_.zeros;
  in_flight_.erase(&zeros);
  take_next_id(lane);
  release(lane);
  if (joining_.ending && joining_.zeros == 0) tell_joined(true);
}

void Communicator::take_zeros_back() {
  joining_.contributes = false;
  joining_.ending = true;
  if (joining_.zeros == 0) {
    tell_joined(true);
    return;
  }
  for (const auto& [submission, owner] : in_flight_) {
    if (!submission->zeros || submission->withdrawing) continue;
    submission->withdrawing = true;
    submission->withdrawn_status = {Code::aborted, "All ranks have joined."};
    if (Status failed = log_->withdraw(submission->lane->id); !failed.ok()) abort_.raise(failed);
  }
}

// Members number unnamed operations, and this one did not count those of others. Nothing is in flight, so all of them
// begin anew at the same point; the coordinator recalls the ids.
void Communicator::forget_unnamed() {
  for (auto entry = names_.begin(); entry != names_.end();) {
    if (!entry->second.unnamed && entry->first.find(".noname.") == std::string::npos) {
      ++entry;
      continue;
    }
    for (const std::unique_ptr<NameEntry::Variant>& variant : entry->second.variants) {
      for (const std::unique_ptr<Lane>& lane : variant->lanes) {
        if (lane->id != Lane::kNoId) lane_of_id_[lane->id] = nullptr;
      }
    }
    entry = names_.erase(entry);
  }
  for (const auto& [key, lane] : retired_) {
    if (lane->id != Lane::kNoId) lane_of_id_[lane->id] = nullptr;
  }
  retired_.clear();
}

}  // namespace horovod
