#include "engine/shared_order_log.h"

namespace horovod {
namespace {

constexpr uint64_t kLow = 0xffffffffu;

uint64_t lap_of(uint64_t index) { return ((index / kMaxIds + 1) & kLow) << 32; }

}  // namespace

SharedOrderLog::SharedOrderLog(Region& region, FuseRule fuse, AbortSignal& abort)
    : region_(region),
      fuse_(std::move(fuse)),
      abort_(abort),
      memory_(*reinterpret_cast<Memory*>(region.log())),
      generations_(kMaxIds) {}

Status SharedOrderLog::arrive(TensorId id) {
  std::atomic<uint64_t>& word = memory_.words[id];
  generations_[id].store(next_generation(id), std::memory_order_relaxed);
  const uint64_t before = word.fetch_add(1, std::memory_order_acq_rel);
  if ((before & kLow) + 1 < static_cast<uint64_t>(region_.size())) return {};
  word.store(((before >> 32) + 1) << 32, std::memory_order_release);
  const uint64_t index = memory_.tail.fetch_add(1, std::memory_order_relaxed);
  memory_.ring[index % kMaxIds].agreed.store(lap_of(index) | id, std::memory_order_release);
  region_.ring_sleepers();
  region_.ring_self();
  return {};
}

Status SharedOrderLog::withdraw(TensorId id) {
  std::atomic<uint64_t>& word = memory_.words[id];
  const uint64_t generation = generations_[id].load(std::memory_order_relaxed);
  uint64_t value = word.load(std::memory_order_acquire);
  do {
    // Another generation, or complete and about to be appended: agreed, poll() will deliver it.
    if (value >> 32 != generation || (value & kLow) == static_cast<uint64_t>(region_.size())) return {};
  } while (!word.compare_exchange_weak(value, value - 1, std::memory_order_acq_rel));
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    withdrawn_.push_back(id);
    any_withdrawn_.store(true, std::memory_order_release);
  }
  wake();
  return {};
}

bool SharedOrderLog::entry(uint64_t index, TensorId& id) const {
  const uint64_t value = memory_.ring[index % kMaxIds].agreed.load(std::memory_order_acquire);
  if ((value & ~kLow) != lap_of(index)) return false;
  id = static_cast<TensorId>(value);
  return true;
}

Status SharedOrderLog::poll(LogEvent& event) {
  event.kind = LogEvent::none;
  event.ids.clear();
  if (any_withdrawn_.load(std::memory_order_acquire)) [[unlikely]] {
    const std::lock_guard<std::mutex> lock(mutex_);
    event.kind = LogEvent::withdrawn;
    event.ids.push_back(withdrawn_.back());
    withdrawn_.pop_back();
    any_withdrawn_.store(!withdrawn_.empty(), std::memory_order_release);
    return {};
  }
  TensorId id;
  if (!entry(cursor_, id)) return {};
  std::atomic<uint64_t>& boundary = memory_.ring[cursor_ % kMaxIds].end;
  uint64_t end = boundary.load(std::memory_order_acquire);
  if (end <= cursor_) {  // of an earlier lap, when a batch ended here at the latest: nobody has decided this one yet
    ready_.clear();
    for (uint64_t index = cursor_; index < cursor_ + kMaxIds && entry(index, id); ++index) ready_.push_back(id);
    uint64_t proposal = cursor_ + fuse_(ready_.data(), ready_.size());
    if (boundary.compare_exchange_strong(end, proposal, std::memory_order_acq_rel)) end = proposal;
  }
  event.kind = LogEvent::batch;
  for (; cursor_ < end; ++cursor_) {
    entry(cursor_, id);  // published: the decider saw it, and its decision was acquired
    event.ids.push_back(id);
  }
  return {};
}

Status SharedOrderLog::wait(int64_t timeout_us) {
  TensorId id;
  const auto ready = [&] {
    return entry(cursor_, id) || woken_.load(std::memory_order_acquire) || abort_.raised() ||
           any_withdrawn_.load(std::memory_order_relaxed);
  };
  int64_t now = now_us();
  const int64_t deadline = now + timeout_us;
  constexpr int64_t kSliceUs = 50'000;  // peers' lives are looked at this often
  for (bool first = true;; first = false, now = now_us()) {
    const Awaited awaited{0, &memory_.ring[cursor_ % kMaxIds].agreed, lap_of(cursor_)};
    if (region_.sleep_until(ready, std::min(deadline, now + kSliceUs), first, &awaited)) break;
    HVD_TRY(region_.check_members());
    if (entry(cursor_, id)) break;  // agreed before a peer left: run it first
    if (const int gone = region_.departed(); gone >= 0) return {Code::left, region_.departure_sentence(gone)};
    if (now_us() >= deadline) break;
  }
  (void)woken_.exchange(false, std::memory_order_acq_rel);  // what was written before a wake() is seen from here on
  return abort_.raised() ? abort_.cause() : Status();
}

void SharedOrderLog::wake() {
  woken_.store(true, std::memory_order_release);
  region_.ring_self();
}

}  // namespace horovod
