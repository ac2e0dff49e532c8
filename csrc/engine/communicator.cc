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

constexpr uint64_t kUnnamedLanes = 32;        // how many unnamed operations of one signature may overlap
constexpr size_t kUnnamedVariants = 512;      // how many signatures of one kind of unnamed operations are known
constexpr int64_t kBlockedAfterUs = 500'000;  // a wait of this long is told to the coordinator,
constexpr int64_t kBlockedAgainUs =
    1'000'000;  // and told again: only a report that is newer than what it contradicts counts
constexpr int64_t kLeftGraceUs = 1'000'000;  // how long the data plane has to notice a departure by itself
constexpr int64_t kGatherUs = 200;           // how long the background thread lets small operations gather
constexpr int64_t kGatherAgainUs = 1'000;    // and how long once more when some came meanwhile: it costs a wake-up
constexpr int64_t kMostGatherUs = 5'000;     // in all
constexpr uint64_t kStartBytes = 1u << 20;   // so many pending bytes are worth starting at once
constexpr int64_t kTendMs = 10;              // how often somebody looks what a device has done
constexpr int64_t kDriveSliceUs = 100'000;
constexpr int64_t kPatientUs = 10'000;    // who has waited so long for one operation sleeps, whoever is late
constexpr int64_t kLingerUs = 1'000'000;  // for peers that do not take the reason of an abort

bool is_unnamed(const std::string& name) { return name.ends_with(".noname"); }

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
      lane_of_id_(kMaxIds, nullptr),
      by_id_(kMaxIds) {}

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
    if (joining_.mine || !joining_.others.empty()) [[unlikely]]
      HVD_TRY(refusal(submission->spec));
    NameEntry& entry = names_[submission->spec.name];
    entry.unnamed = entry.variants.empty() ? is_unnamed(submission->spec.name) : entry.unnamed;
    if (entry.in_flight) {
      return {Code::invalid_argument, "Requested to submit " + submission->spec.name + " on rank " +
                                          std::to_string(ranks_[rank_]) +
                                          ", a tensor with the same name as another tensor that is currently being "
                                          "processed. Give each operation in flight a name of its own, or synchronize "
                                          "the earlier one first."};
    }
    entry.in_flight = !entry.unnamed;
    submission->entry = &entry;
    submission->lane = &lane_for(entry, *submission);
    ++submission->lane->users;
    in_flight_.emplace(submission.get(), submission);
    ++pending_;
    ++activity_;
    if (entry.unnamed) submission->unnamed = entry.submitted++;
    if (submission->lane->active) {
      submission->lane->waiting.push_back(submission.get());
    } else {
      begin(*submission);
    }
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

Lane& Communicator::lane_for(NameEntry& entry, const Submission& submission) {
  NameEntry::Variant* variant = nullptr;
  for (const std::unique_ptr<NameEntry::Variant>& known : entry.variants) {
    if (known->lanes[0]->spec.agrees_with(submission.spec)) {
      variant = known.get();
      break;
    }
  }
  if (!variant) {
    if (entry.unnamed && entry.variants.size() >= kUnnamedVariants) make_room(entry);
    entry.variants.push_back(std::make_unique<NameEntry::Variant>());
    variant = entry.variants.back().get();
  }
  variant->latest = entry.submitted;
  // The lane depends on the number of earlier operations only, so all members choose alike.
  const size_t index = entry.unnamed ? variant->submitted++ % kUnnamedLanes : 0;
  if (index == variant->lanes.size()) {
    variant->lanes.push_back(std::make_unique<Lane>());
    variant->lanes.back()->spec = submission.spec;
  }
  return *variant->lanes[index];
}

void Communicator::begin(Submission& submission) {
  Lane& lane = *submission.lane;
  lane.active = &submission;
  if (timeline_.active() && !submission.zeros) [[unlikely]]
    timeline_.begun(submission, lane.id, ranks_);
  if (lane.id == Lane::kNoId) {
    announce(submission);
    return;
  }
  by_id_[lane.id].store(&submission, std::memory_order_release);
  submission.arrived = true;
  // Another library's algorithms take the tensors as they are; ours may let small ones travel with the arrival.
  Status status = plane_.backend ? log_->arrive(lane.id) : log_->arrive_with(lane.id, submission);
  if (!status.ok()) {
    abort_.raise(status);
    log_->wake();
  }
}

void Communicator::announce(Submission& submission) {
  announced_[submission.announced_name()] = &submission;
  tell_coordinator(OutboxItem::announce, submission);
  counters_.announced.fetch_add(1, std::memory_order_relaxed);
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
  if (!done() && !submission.running.load(std::memory_order_relaxed) &&
      now - submission.waited_since_us > kBlockedAfterUs && now - submission.reported_us > kBlockedAgainUs) {
    submission.reported_us = now;
    tell_coordinator(OutboxItem::blocked, submission);
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

void Communicator::unfinished(std::vector<Unfinished>& found) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [submission, owner] : in_flight_) {
    if (submission->zeros || submission->running.load(std::memory_order_relaxed)) continue;
    found.push_back({submission->number, process_set_, submission->announced_name(), submission->waited_since_us != 0});
  }
}

Status Communicator::run(const LogEvent& event) {
  const std::vector<TensorId>& ids = event.ids;
  std::vector<Operation*>& batch = batch_;
  batch.clear();
  uint64_t bytes = 0;
  for (const TensorId id : ids) {
    Submission* const submission = id < kMaxIds ? by_id_[id].load(std::memory_order_acquire) : nullptr;
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
    for (Operation* operation : batch) complete(static_cast<Submission&>(*operation), {});
    if (helpers_ > 1 || background_drives_) driver_changed_.notify_all();
  }
  return {};
}

void Communicator::complete(Submission& submission, Status status) {
  if (submission.zeros) [[unlikely]] {
    complete_zeros(submission);
    return;
  }
  if (submission.traced) [[unlikely]]
    timeline_.ended(submission, status);
  const auto owner = in_flight_.find(&submission);
  const std::shared_ptr<Submission> keep = owner->second;
  in_flight_.erase(owner);
  --pending_;
  Lane& lane = *submission.lane;
  if (lane.active == &submission) {
    lane.active = nullptr;
    if (lane.id != Lane::kNoId) forget(lane.id, submission);
    if (submission.withdrawing && lane.id != Lane::kNoId && submission.withdrawn_status.ok()) finish_recall(lane);
  }
  submission.entry->in_flight = false;
  submission.status = std::move(status);
  submission.state.store(Operation::done, std::memory_order_release);
  if (submission.completions) [[unlikely]]
    submission.completions->add(keep);
  if (!lane.active && !lane.waiting.empty()) {
    Submission* next = lane.waiting.front();
    lane.waiting.pop_front();
    begin(*next);
  }
  release(lane);
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
    const Submission* const submission = by_id_[ids[index]].load(std::memory_order_acquire);
    return submission ? &submission->spec : nullptr;
  };
  return fused_count(count, spec_at, config_.fusion_threshold_bytes);
}

}  // namespace horovod
