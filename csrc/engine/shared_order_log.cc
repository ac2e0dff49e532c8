#include "engine/shared_order_log.h"

#include <algorithm>

#include "collectives/shared/eager.h"

namespace horovod {
namespace {

constexpr uint64_t kLow = 0xffffffffu;
constexpr uint64_t kOneLap = uint64_t{1} << 32;
constexpr uint64_t kAlone = uint64_t{1} << 31;
static_assert(kMaxIds <= kAlone);

uint64_t lap_of(uint64_t index) { return ((index / kMaxIds + 1) & kLow) << 32; }

}  // namespace

SharedOrderLog::SharedOrderLog(Region& region, FuseRule fuse, AbortSignal& abort)
    : region_(region),
      fuse_(std::move(fuse)),
      abort_(abort),
      memory_(*reinterpret_cast<Memory*>(region.log())),
      own_(kMaxIds) {}

Status SharedOrderLog::arrive(TensorId id, Operation* operation, bool alone) {
  std::atomic<uint64_t>& word = memory_.words[id];
  // The next generation can't begin before this member has arrived.
  const auto generation = static_cast<uint32_t>(word.load(std::memory_order_relaxed) >> 32);
  if (operation) shared::store_eager(region_, *operation, id, generation);
  own_[id].small.store(operation, std::memory_order_relaxed);
  own_[id].generation.store(generation, std::memory_order_release);
  const uint64_t before = word.fetch_add(1, std::memory_order_acq_rel);
  if ((before & kLow) + 1 < static_cast<uint64_t>(region_.size())) return {};
  word.store(((before >> 32) + 1) << 32, std::memory_order_release);
  append(id, alone);
  region_.ring_all();
  return {};
}

// Takes the first free place of the ring. The search may start anywhere before it, so it starts at a bound that this
// member keeps in a cache line of its own; a place that is not of the lap before is in use, however old the bound is.
void SharedOrderLog::append(TensorId id, bool alone) {
  const uint64_t entry = id | (alone ? kAlone : 0);
  uint64_t index = std::max(cursor_.load(std::memory_order_relaxed), appended_.load(std::memory_order_relaxed));
  for (;; ++index) {
    std::atomic<uint64_t>& place = memory_.ring[index % kMaxIds].agreed;
    uint64_t before = place.load(std::memory_order_relaxed);
    const uint64_t lap = lap_of(index);
    if ((before & ~kLow) != lap - kOneLap) continue;
    if (place.compare_exchange_strong(before, lap | entry, std::memory_order_acq_rel)) break;
  }
  appended_.store(index + 1, std::memory_order_relaxed);
}

Status SharedOrderLog::arrive_with(TensorId id, Operation& operation) {
  const bool small = shared::is_eager(operation.spec, id, region_.size());
  return arrive(id, small ? &operation : nullptr, operation.waited_for);
}

Status SharedOrderLog::withdraw(TensorId id) {
  std::atomic<uint64_t>& word = memory_.words[id];
  const uint64_t generation = own_[id].generation.load(std::memory_order_relaxed);
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

bool SharedOrderLog::entry(uint64_t index, TensorId& id, bool* alone) const {
  const uint64_t value = memory_.ring[index % kMaxIds].agreed.load(std::memory_order_acquire);
  if ((value & ~kLow) != lap_of(index)) return false;
  id = static_cast<TensorId>(value & (kAlone - 1));
  if (alone) *alone = (value & kAlone) != 0;
  return true;
}

Status SharedOrderLog::poll(LogEvent& event) {
  event.kind = LogEvent::none;
  event.ids.clear();
  event.completed = false;
  if (any_withdrawn_.load(std::memory_order_acquire)) [[unlikely]] {
    const std::lock_guard<std::mutex> lock(mutex_);
    event.kind = LogEvent::withdrawn;
    event.ids.push_back(withdrawn_.back());
    withdrawn_.pop_back();
    any_withdrawn_.store(!withdrawn_.empty(), std::memory_order_release);
    return {};
  }
  uint64_t cursor = cursor_.load(std::memory_order_relaxed);
  TensorId id;
  bool alone = false;
  if (!entry(cursor, id, &alone)) return {};
  const uint64_t end = alone ? cursor + 1 : end_of_batch(cursor);
  event.kind = LogEvent::batch;
  event.completed = is_complete(id);
  for (; cursor < end; ++cursor) {
    entry(cursor, id);  // the entry is visible here: the decider saw it, and its decision was acquired
    if (!event.ids.empty() && is_complete(id) != event.completed) break;
    HVD_TRY(finish(id, event.completed));
    event.ids.push_back(id);
  }
  cursor_.store(cursor, std::memory_order_relaxed);
  return {};
}

// Whether the cells hold all members' bytes of the operation that is agreed as `id`.
bool SharedOrderLog::is_complete(TensorId id) const {
  const Own& own = own_[id];
  const uint32_t generation = own.generation.load(std::memory_order_acquire);
  const Operation* const operation = own.small.load(std::memory_order_relaxed);
  return operation && shared::is_complete(region_, operation->spec, id, generation);
}

// Takes the result from the cells or, if the rows did not fit into them, the row counts.
Status SharedOrderLog::finish(TensorId id, bool complete) {
  const Own& own = own_[id];
  const uint32_t generation = own.generation.load(std::memory_order_acquire);
  Operation* const operation = own.small.load(std::memory_order_relaxed);
  if (!operation) return {};
  if (complete) return shared::run_eager(region_, *operation, id, generation);
  shared::take_rows(region_, *operation, id, generation);
  return {};
}

// Where the batch that begins at `first` ends, if the log has an entry there.
uint64_t SharedOrderLog::end_of_batch(uint64_t first) {
  std::atomic<uint64_t>& boundary = memory_.ring[first % kMaxIds].end;
  uint64_t end = boundary.load(std::memory_order_acquire);
  if (end > first) return end;
  // The boundary is of an earlier lap: no member has decided where this batch ends yet.
  ready_.clear();
  TensorId id;
  for (uint64_t index = first; index < first + kMaxIds && entry(index, id); ++index) {
    if (!ready_.empty() && own_[id].is_small() != own_[ready_[0]].is_small()) break;
    ready_.push_back(id);
  }
  const uint64_t proposal = first + fuse_(ready_.data(), ready_.size());
  return boundary.compare_exchange_strong(end, proposal, std::memory_order_acq_rel) ? proposal : end;
}

Status SharedOrderLog::wait(int64_t until_us) {
  const uint64_t cursor = cursor_.load(std::memory_order_relaxed);
  TensorId id;
  const auto ready = [&] {
    return entry(cursor, id) || woken_.load(std::memory_order_acquire) || abort_.raised() ||
           any_withdrawn_.load(std::memory_order_relaxed);
  };
  for (bool first = true;; first = false) {
    const Awaited awaited{0, &memory_.ring[cursor % kMaxIds].agreed, lap_of(cursor)};
    if (region_.sleep_until(ready, until_us, first, &awaited)) break;
    HVD_TRY(region_.check_members());
    if (entry(cursor, id)) break;  // it was agreed before a peer left, and is run first
    if (const int gone = region_.departed(); gone >= 0) return {Code::left, region_.departure_sentence(gone)};
    if (now_us() >= until_us) break;
  }
  (void)woken_.exchange(false, std::memory_order_acq_rel);  // what others wrote before wake() is visible from here on
  return abort_.raised() ? abort_.cause() : Status();
}

void SharedOrderLog::wake() {
  woken_.store(true, std::memory_order_release);
  region_.ring_self();
}

}  // namespace horovod
