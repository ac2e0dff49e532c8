#include "engine/communicator.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include <pthread.h>

#include "collectives/alone.h"
#include "collectives/topology.h"
#include "engine/completions.h"
#include "engine/fusion.h"

namespace horovod {
namespace {

constexpr int64_t kLeftGraceUs = 1'000'000;  // how long the data plane has to notice a departure by itself
constexpr int64_t kGatherUs = 200;           // how long the background thread lets small operations gather
constexpr int64_t kGatherAgainUs = 1'000;    // and how long once more when some came meanwhile: it costs a wake-up
constexpr int64_t kMostGatherUs = 5'000;     // in all
constexpr uint64_t kStartBytes = 1u << 20;   // so many pending bytes are worth starting at once
constexpr int64_t kTendMs = 10;              // how often somebody looks what a device has done
constexpr int64_t kDriveSliceUs = 100'000;
constexpr int64_t kPatientUs = 10'000;    // who has waited so long for one operation sleeps, whoever is late
constexpr int64_t kLingerUs = 1'000'000;  // for peers that do not take the reason of an abort

}  // namespace

Communicator::Communicator(int process_set, int rank, std::vector<int> ranks, std::vector<std::string> labels,
                           std::vector<int> placement, const Config& config, AbortSignal& abort, Outbox& outbox,
                           Timeline& timeline, std::function<void()> on_abort)
    : process_set_(process_set),
      rank_(rank),
      ranks_(std::move(ranks)),
      labels_(std::move(labels)),
      placement_(std::move(placement)),
      config_(config),
      abort_(abort),
      outbox_(outbox),
      timeline_(timeline),
      on_abort_(std::move(on_abort)),
      table_(process_set),
      join_(table_, ranks_[rank_], [this](Submission& zeros) { return make_zeros(zeros); }) {}

Communicator::~Communicator() {
  if (const Status stuck = close(""); !stuck.ok()) {  // whoever owns this had to keep it
    std::fprintf(stderr, "horovod: %s\n", stuck.message().c_str());
    std::abort();
  }
}

Status Communicator::submit(const std::shared_ptr<Submission>& submission, bool wait_follows) {
  counters_.submitted.fetch_add(1, std::memory_order_relaxed);
  submission->waited_for = wait_follows;
  if (!log_) {
    HVD_TRY(submit_alone(*submission));
    if (submission->completions) [[unlikely]]
      submission->completions->add(submission);
    return {};
  }
  bool wake_background = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!ended_.ok()) return with_context(ended_, *submission);
    if (abort_.raised()) return with_context(abort_.cause(), *submission);
    if (closed_) return {Code::aborted, closed_why_};
    if (join_.restricts()) [[unlikely]]
      HVD_TRY(join_.refusal(submission->spec));
    if (!table_.submit(submission, effects_)) {
      return {Code::invalid_argument, "Requested to submit " + submission->spec.name + " on rank " +
                                          std::to_string(ranks_[rank_]) +
                                          ", a tensor with the same name as another tensor that is currently being "
                                          "processed. Give each operation in flight a name of its own, or synchronize "
                                          "the earlier one first."};
    }
    ++activity_;
    apply_effects();
    if (!wait_follows && needs_background() && !driving_) {
      unstarted_bytes_ += bytes_of(submission->spec);
      wake_background = background_idle_ || unstarted_bytes_ >= kStartBytes;
    }
  }
  if (wake_background) background_wanted_.notify_one();
  return {};
}

// The only member: nothing is announced, nobody is waited for.
Status Communicator::submit_alone(Submission& submission) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (abort_.raised()) return with_context(abort_.cause(), submission);
    if (closed_) return {Code::aborted, closed_why_};
  }
  if (timeline_.active()) [[unlikely]]
    timeline_.began_alone(submission, plane_, ranks_);
  submission.status = check_alone(submission.spec, ranks_[rank_]);
  if (submission.status.ok()) {
    if (submission.on_device) [[unlikely]] {
      run_alone(submission);
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
          timeline_.begun(*submission, effect.id, ranks_);
        // Another library's algorithms take the tensors as they are; ours may let small ones travel with the arrival.
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
          timeline_.begun(*submission, TimelineEvent::kNoId, ranks_);
        tell_coordinator(OutboxItem::announce, *submission);
        counters_.announced.fetch_add(1, std::memory_order_relaxed);
        break;
      case Effect::tell_blocked:
        tell_coordinator(OutboxItem::blocked, *submission);
        break;
      case Effect::recalled:
        outbox_.push({.kind = OutboxItem::recalled, .process_set = process_set_, .ids = std::move(effect.ids)});
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

void Communicator::apply_effects_beside_driver() {
  if (!apply_effects()) return;
  driver_changed_.notify_all();
  log_->wake();
}

void Communicator::tell_coordinator(OutboxItem::Kind kind, const Submission& submission) {
  OutboxItem item;
  item.kind = kind;
  item.spec = submission.spec;
  item.spec.name = submission.announced_name();
  if (item.spec.type == OpType::broadcast) item.spec.root = ranks_[item.spec.root];
  item.process_set = process_set_;
  if (kind == OutboxItem::blocked) item.waited_us = submission.reported_us - submission.waited_since_us;
  outbox_.push(std::move(item));
}

bool Communicator::wait(Submission& submission, int64_t timeout_us) {
  const auto done = [&] { return submission.state.load(std::memory_order_acquire) == Operation::done; };
  if (done()) return true;
  const int64_t started = now_us();
  const int64_t deadline = started + timeout_us;
  std::unique_lock<std::mutex> lock(mutex_);
  if (submission.waited_since_us == 0) submission.waited_since_us = started;
  ++helpers_;
  int64_t now = started;
  while (!done() && now < deadline) {
    if (driving_) {
      if (background_drives_) log_->wake();  // it lets go at the next chance: a waiting caller is faster
      driver_changed_.wait_for(lock, std::chrono::microseconds(deadline - now));
    } else {
      driving_ = true;
      DeviceBackend* const device = busy_device();
      lock.unlock();
      set_patient(now - submission.waited_since_us < kPatientUs);
      drive(done, deadline, device);
      lock.lock();
      driving_ = false;
      driver_changed_.notify_all();
    }
    if (!done()) now = now_us();
  }
  --helpers_;
  ++activity_;
  if (!done()) {
    table_.waits(submission, now, effects_);
    apply_effects();
  }
  const bool wake_background = farewell_due_ || ((needs_background() || device_busy()) && background_idle_);
  lock.unlock();
  if (wake_background) background_wanted_.notify_one();
  return done();
}

void Communicator::set_patient(bool patient) {
  if (region_) region_->set_patient(patient);
  if (mesh_) mesh_->set_patient(patient);
}

void Communicator::drive(const std::function<bool()>& enough, int64_t deadline_us, DeviceBackend* device) {
  for (bool in_vain = false; !enough();) {
    Status status = abort_.raised() ? abort_.cause() : log_->poll(event_);
    if (status.ok() && event_.kind == LogEvent::batch) {
      status = run(event_);
      in_vain = false;
    } else if (status.ok() && event_.kind == LogEvent::withdrawn) {
      answer_withdrawn(event_.ids[0]);
    } else if (status.ok()) {
      // After a wait that brought nothing, but not before a first one, which a small operation would notice.
      if (in_vain || watched_device_.load(std::memory_order_relaxed)) {
        const std::lock_guard<std::mutex> lock(mutex_);
        device = busy_device();
        const int64_t now = now_us();
        if (!left_sentence_.empty() && now - left_since_us_ > kLeftGraceUs) {
          status = {Code::left, left_sentence_};
        } else if (now >= deadline_us) {
          return;
        }
      }
      if (status.ok() && device) [[unlikely]]
        status = device->tend();
      if (status.ok()) status = log_->wait(device ? std::min(deadline_us, now_us() + kTendMs * 1000) : deadline_us);
      in_vain = true;
    }
    if (!status.ok()) {
      end(status);
      return;
    }
  }
}

Status Communicator::run(const LogEvent& event) {
  const std::vector<TensorId>& ids = event.ids;
  std::vector<Operation*>& batch = batch_;
  batch.clear();
  uint64_t bytes = 0;
  for (const TensorId id : ids) {
    Submission* const submission = table_.arrived(id);
    if (!submission) {
      return {Code::internal, "The order log agreed on id " + std::to_string(id) + " that rank " +
                                  std::to_string(ranks_[rank_]) + " did not submit; please report this."};
    }
    submission->running.store(true, std::memory_order_relaxed);
    batch.push_back(submission);
    bytes += bytes_of(submission->spec);
  }
  counters_.batches.fetch_add(1, std::memory_order_relaxed);
  counters_.agreed.fetch_add(ids.size(), std::memory_order_relaxed);
  counters_.bytes.fetch_add(bytes, std::memory_order_relaxed);
  if (timeline_.active()) [[unlikely]]
    timeline_.running(batch, plane_, event.completed);
  if (!event.completed) HVD_TRY(run_batch(plane_, batch));
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!stuck_.ok()) return ended_;  // close() did not wait any longer, and has failed them
    for (Operation* operation : batch) {
      Submission& submission = static_cast<Submission&>(*operation);
      if (submission.zeros) [[unlikely]] {
        join_.settled(submission, effects_);
      } else {
        table_.ran(submission, effects_);
      }
    }
    apply_effects();
    if (helpers_ > 1 || background_drives_) driver_changed_.notify_all();
  }
  return {};
}

void Communicator::answer_withdrawn(TensorId id) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Submission* const submission = table_.arrived(id);
  if (!submission) return;
  if (submission->zeros) {
    join_.settled(*submission, effects_);
  } else {
    table_.withdrawn(*submission, effects_);
  }
  if (apply_effects()) driver_changed_.notify_all();
}

void Communicator::start_background() {
  background_ = std::thread([this] {
    background();
    const std::lock_guard<std::mutex> lock(mutex_);
    background_over_ = true;
    driver_changed_.notify_all();
  });
  pthread_setname_np(background_.native_handle(), "hvd-progress");
  if (config_.background_cpu >= 0) {  // the caller checked that this process may use it
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(config_.background_cpu, &set);
    pthread_setaffinity_np(background_.native_handle(), sizeof set, &set);
  }
}

void Communicator::background() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    background_idle_ = true;
    const auto wanted = [&] {
      return stopping_ || device_end_due_ || ((farewell_due_ || needs_background()) && !driving_);
    };
    if (device_busy()) {
      background_wanted_.wait_for(lock, std::chrono::milliseconds(kTendMs), wanted);
    } else {
      background_wanted_.wait(lock, [&] { return wanted() || device_busy(); });
    }
    background_idle_ = false;
    if (device_end_due_) {
      device_end_due_ = false;
      lock.unlock();
      device_->abort();
      lock.lock();
      continue;
    }
    if (!stopping_ && !driving_ && device_busy()) {
      driving_ = background_drives_ = true;
      lock.unlock();
      tend_device();
      lock.lock();
      driving_ = background_drives_ = false;
      driver_changed_.notify_all();
      if (!farewell_due_ && !needs_background()) continue;
    }
    if (farewell_due_ && !driving_) {
      driving_ = background_drives_ = true;
      farewell_due_ = false;
      lock.unlock();
      mesh_->linger(kLingerUs);
      lock.lock();
      driving_ = background_drives_ = false;
      driver_changed_.notify_all();
      continue;
    }
    // Small operations seldom come alone: a moment's patience makes one batch of them, or leaves them to a caller that
    // waits. Large ones are worth starting at once.
    const int64_t limit_us = now_us() + kMostGatherUs;
    int64_t slice_us = kGatherUs;
    for (bool more = true; more; slice_us = kGatherAgainUs) {
      const uint64_t seen = activity_;
      const bool enough = background_wanted_.wait_for(lock, std::chrono::microseconds(slice_us), [&] {
        return stopping_ || farewell_due_ || device_end_due_ || (unstarted_bytes_ >= kStartBytes && !driving_);
      });
      more = !enough && activity_ != seen && now_us() < limit_us;
    }
    if (stopping_) return;
    if (farewell_due_ || device_end_due_) continue;
    if (!needs_background() || driving_) continue;
    driving_ = background_drives_ = true;
    unstarted_bytes_ = 0;
    DeviceBackend* const device = busy_device();
    lock.unlock();
    set_patient(false);
    drive(
        [&] {
          const std::lock_guard<std::mutex> check(mutex_);
          return stopping_ || !needs_background();
        },
        now_us() + kDriveSliceUs, device);
    lock.lock();
    driving_ = background_drives_ = false;
    driver_changed_.notify_all();
  }
}

size_t Communicator::fuse(const TensorId* ids, size_t count) {
  const auto spec_at = [this, ids](size_t index) -> const OpSpec* {
    const Submission* const submission = table_.arrived(ids[index]);
    return submission ? &submission->spec : nullptr;
  };
  return fused_count(count, spec_at, config_.fusion_threshold_bytes);
}

}  // namespace horovod
