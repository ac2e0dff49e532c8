#include "engine/communicator.h"

#include <cstdio>
#include <cstdlib>

#include "base/limits.h"
#include "collectives/alone.h"
#include "collectives/topology.h"
#include "engine/completions.h"
#include "engine/fusion.h"

namespace horovod {

Communicator::Communicator(Members members, const Config& config, AbortSignal& abort, Outbox& outbox,
                           Timeline& timeline, std::function<void()> on_abort)
    : members_(std::move(members)),
      config_(config),
      abort_(abort),
      outbox_(outbox),
      timeline_(timeline),
      on_abort_(std::move(on_abort)),
      device_(
          members_, config_, plane_, abort_, outbox_, [this] { return look_at_peers(); }, on_abort_),
      driver_(*this, abort_),
      table_(members_.process_set),
      join_(table_, members_.ranks[members_.rank], [this](Submission& zeros) { return make_zeros(zeros); }) {}

Communicator::~Communicator() {
  if (const Status stuck = close(""); !stuck.ok()) {  // the owner must not destroy a communicator that is stuck
    std::fprintf(stderr, "horovod: %s\n", stuck.message().c_str());
    std::abort();
  }
}

Status Communicator::submit(const std::shared_ptr<Submission>& submission, Start start) {
  counters_.submitted.fetch_add(1, std::memory_order_relaxed);
  submission->waited_for = start == Start::by_waiter;
  if (!log_) {
    HVD_TRY(submit_alone(*submission));
    if (submission->completions) [[unlikely]]
      submission->completions->add(submission);
    return {};
  }
  Driver::Lock lock(driver_.mutex());
  if (!ended_.ok()) return with_context(ended_, *submission);
  if (abort_.raised()) return with_context(abort_.cause(), *submission);
  if (!closed_.ok()) return closed_;
  HVD_TRY(join_.refusal(submission->spec));
  if (!table_.submit(submission, effects_)) {
    return {Code::invalid_argument, error_code::name_in_flight,
            "Requested to submit " + submission->spec.name + " on rank " + members_.own_rank() +
                ", a tensor with the same name as another tensor that is currently being "
                "processed. Give each operation in flight a name of its own, or synchronize "
                "the earlier one first."};
  }
  apply_effects();
  driver_.submitted(lock, submission->spec, start);
  return {};
}

// The only member: there is nothing to announce and no one to wait for.
Status Communicator::submit_alone(Submission& submission) {
  {
    const std::lock_guard<std::mutex> lock(driver_.mutex());
    if (abort_.raised()) return with_context(abort_.cause(), submission);
    if (!closed_.ok()) return closed_;
  }
  if (timeline_.active()) [[unlikely]]
    timeline_.began_alone(submission, plane_, members_.ranks);
  submission.status = check_alone(submission.spec, members_.ranks[members_.rank]);
  if (submission.status.ok()) {
    if (submission.on_device) [[unlikely]] {
      submission.status = device_.run_alone(submission);
    } else {
      Operation* one[] = {&submission};
      submission.status = run_batch(plane_, one);
    }
  }
  if (submission.traced) [[unlikely]]
    timeline_.ended(submission, submission.status);
  submission.state.store(Operation::done, std::memory_order_release);
  return {};
}

bool Communicator::apply_effects() {
  bool ended = false;
  for (Effect& effect : effects_) {
    Submission* const submission = effect.submission;
    switch (effect.kind) {
      case Effect::arrive: {
        if (timeline_.active() && !submission->zeros) [[unlikely]]
          timeline_.begun(*submission, effect.id, members_.ranks);
        // Our own algorithms may let small tensors travel with the arrival; those of another library take them in the
        // batch.
        Status status = plane_.backend ? log_->arrive(effect.id) : log_->arrive_with(effect.id, *submission);
        if (!status.ok()) {
          abort_.raise(std::move(status));
          log_->wake();
        }
        break;
      }
      case Effect::withdraw:
        if (Status failed = log_->withdraw(effect.id); !failed.ok()) abort_.raise(std::move(failed));
        break;
      case Effect::announce:
        if (timeline_.active() && !submission->traced) [[unlikely]]
          timeline_.begun(*submission, TimelineEvent::kNoId, members_.ranks);
        tell_coordinator(OutboxItem::announce, *submission);
        counters_.announced.fetch_add(1, std::memory_order_relaxed);
        break;
      case Effect::tell_blocked:
        tell_coordinator(OutboxItem::blocked, *submission);
        break;
      case Effect::recalled:
        outbox_.push({.kind = OutboxItem::recalled, .process_set = members_.process_set, .ids = std::move(effect.ids)});
        break;
      case Effect::tell_joined:
        outbox_.push({.kind = OutboxItem::join, .round = effect.round, .without_zeros = effect.without_zeros});
        break;
      case Effect::complete:
        if (effect.done->traced) [[unlikely]]
          timeline_.ended(*effect.done, effect.done->status);
        effect.done->state.store(Operation::done, std::memory_order_release);
        if (effect.done->completions) [[unlikely]]
          effect.done->completions->add(std::move(effect.done));
        ended = true;
        break;
    }
  }
  effects_.clear();
  return ended;
}

void Communicator::tell_coordinator(OutboxItem::Kind kind, const Submission& submission) {
  OutboxItem item;
  item.kind = kind;
  item.spec = submission.spec;
  item.spec.name = submission.announced_name();
  if (traits_of(item.spec.type).rooted) item.spec.root = members_.ranks[item.spec.root];
  item.process_set = members_.process_set;
  if (kind == OutboxItem::blocked) item.waited_us = submission.reported_us - submission.seen_us;
  item.number = submission.number;
  outbox_.push(std::move(item));
}

bool Communicator::wait(Submission& submission, int64_t timeout_us) {
  if (submission.is_done()) return true;
  const auto done = [&] { return submission.is_done(); };
  const int64_t started = now_us();
  Driver::Lock lock(driver_.mutex());
  if (submission.waited_since_us == 0) submission.waited_since_us = started;
  if (submission.seen_us == 0) submission.seen_us = started;
  driver_.help(lock, done, submission.waited_since_us, started + timeout_us);
  driver_.helped(lock);
  return done();
}

bool Communicator::tell_when_done(Submission& submission, OnDone on_done, Completions& completions) {
  Driver::Lock lock(driver_.mutex());
  if (submission.is_done()) return false;
  submission.on_done = std::move(on_done);
  submission.completions = &completions;
  submission.waited_for = false;
  submission.waited_since_us = 0;
  driver_.left(lock);
  return true;
}

void Communicator::set_patient(bool patient) {
  if (region_) region_->set_patient(patient);
  if (mesh_) mesh_->set_patient(patient);
}

bool Communicator::needs_driver() {
  return ended_.ok() && (is_pending() || join_.joined() || now_us() < serving_until_us_);
}

// A peer that leaves in order has done its part of the queued operations, so they will finish.
DeviceBackend* Communicator::busy_device() {
  const bool passes = ended_.ok() || (ended_.code() == Code::left && !abort_.raised());
  return passes && device_.busy() ? device_.backend() : nullptr;
}

Status Communicator::overdue(int64_t now_us) {
  if (left_sentence_.empty() || now_us - left_since_us_ <= limits::kDepartureGraceUs) return {};
  return {Code::left, left_sentence_};
}

void Communicator::linger() { mesh_->linger(limits::kFarewellUs); }

Status Communicator::look_at_peers() {
  if (abort_.raised()) return abort_.cause();
  if (region_) HVD_TRY(region_->check_members());
  bool busy = false;
  return mesh_ ? mesh_->progress(busy) : Status();
}

void Communicator::tend_device() {
  if (Status status = device_.tend(); !status.ok()) end(status);
}

void Communicator::watch(int64_t now_us) {
  table_.watch(now_us, effects_);
  apply_effects();
}

// Exact while no batch runs: an operation that is missing from the list has been counted as executed, has not been
// submitted, or was refused. run() counts a batch as agreed before it marks the operations as running, so whoever sees
// such a mark sees that count as well.
void Communicator::add_to(BlockedReport& report) {
  const std::lock_guard<std::mutex> lock(driver_.mutex());
  const bool settled = table_.unfinished(report.unfinished);
  table_.unnamed(report.unnamed);
  const bool runs = counters_.agreed.load(std::memory_order_relaxed) != executed_;
  report.moving = report.moving || runs || !settled;
  report.executed.push_back({members_.process_set, executed_});
}

Status Communicator::run(const LogEvent& event) {
  counters_.agreed.fetch_add(event.ids.size(), std::memory_order_relaxed);
  batch_.clear();
  uint64_t bytes = 0;
  for (const TensorId id : event.ids) {
    Submission* const submission = table_.arrived(id);
    if (!submission) {
      return {Code::internal, error_code::internal,
              "The order log agreed on id " + std::to_string(id) + " that rank " + members_.own_rank() +
                  " did not submit; please report this."};
    }
    submission->running.store(true, std::memory_order_release);
    batch_.push_back(submission);
    bytes += submission->spec.bytes();
  }
  counters_.batches.fetch_add(1, std::memory_order_relaxed);
  counters_.bytes.fetch_add(bytes, std::memory_order_relaxed);
  if (timeline_.active()) [[unlikely]]
    timeline_.running(batch_, plane_, event.completed);
  if (!event.completed) HVD_TRY(run_batch(plane_, batch_));
  {
    const std::lock_guard<std::mutex> lock(driver_.mutex());
    if (!stuck_.ok()) return ended_;  // close() has given up its wait, and these operations have failed
    executed_ += batch_.size();
    for (Operation* operation : batch_) {
      Submission& submission = static_cast<Submission&>(*operation);
      if (submission.zeros) [[unlikely]] {
        join_.settled(submission, effects_);
      } else {
        join_.ran(submission, effects_);
      }
    }
    apply_effects();
    driver_.completed();
  }
  return {};
}

void Communicator::withdrawn(TensorId id) {
  const std::lock_guard<std::mutex> lock(driver_.mutex());
  Submission* const submission = table_.arrived(id);
  if (!submission) return;
  if (submission->zeros) {
    join_.settled(*submission, effects_);
  } else {
    table_.withdrawn(*submission, effects_);
  }
  if (apply_effects()) driver_.wake_waiting();
}

size_t Communicator::fuse(const TensorId* ids, size_t count) {
  const auto spec_at = [this, ids](size_t index) -> const OpSpec* {
    const Submission* const submission = table_.arrived(ids[index]);
    return submission ? &submission->spec : nullptr;
  };
  return fused_count(count, spec_at, config_.fusion_threshold_bytes);
}

}  // namespace horovod
