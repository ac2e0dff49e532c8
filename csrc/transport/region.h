// One communicator's window on the segments of its members: progress counters, doorbells, order log, buffers.
//
// Theory of operation. Data moves in rounds, numbered alike on every member because every member runs the same batches
// in the same order. In round r a member fills buffer r % buffer_count (r % kWideBuffers of the wide ones, see
// wide_buffer) of its own area and publishes the counter of a phase (release); others wait for that counter (acquire)
// and read the buffer. A buffer is filled again only when every member has `finished` the round that used it last. Each
// counter is written by its owner only and never goes back.
//
// Sleeping. A member that finds nothing to do polls briefly, then sleeps on its doorbell (a futex): it announces itself
// in `sleepers`, looks once more, and sleeps. A publisher first stores its counter, then looks at `sleepers`. Both
// sides put a full fence between their store and their load, so one of them sees the other (Dekker) and no wake-up is
// lost.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/abort.h"
#include "base/clock.h"
#include "base/config.h"
#include "base/limits.h"
#include "base/status.h"
#include "base/wait.h"
#include "transport/processor_sharing.h"
#include "transport/segment.h"

namespace horovod {

enum class Phase : int { posted = 0, reduced = 1, finished = 2 };
inline constexpr int kPhases = 3;

// Cells for small operations (collectives/shared/eager.h): two for each of the first ids. The memory is touched, and so
// taken, only where it is used. A stride that is no power of two spreads cells over the sets of the caches.
inline constexpr uint32_t kEagerIds = 4096;
inline constexpr size_t kEagerBytes = 2048;
inline constexpr size_t kCellStride = kEagerBytes + 64;

// Start of a member's area. One cache line for each counter, so that a spinning reader disturbs one writer only.
struct RegionControl {
  struct alignas(64) Counter {
    std::atomic<uint64_t> value;
  };
  struct alignas(64) Doorbell {
    std::atomic<uint32_t> rings;     // futex word; anybody adds
    std::atomic<uint32_t> sleepers;  // threads of the owner that sleep or are about to; owner adds and subtracts
  };
  Counter phases[kPhases];
  Doorbell bell;
  WaitHint waits;
  // Where the owner also moves data over a network: counted up while the owner waits for another member, so that a
  // member that waits for the owner does not blame it for the delay. Owner writes, others compare; any order.
  alignas(64) std::atomic<uint32_t> beats;
};

class Region {
 public:
  // Bytes of the control part in front of the buffers: control page and order log.
  static size_t log_offset() { return 4096; }
  static size_t area_bytes(const Config& config, size_t log_bytes);

  // segments[i] belongs to member i and holds this communicator's area at `offset`. labels[i] names it in messages.
  Region(int rank, std::vector<std::shared_ptr<Segment>> segments, std::vector<std::string> labels, size_t offset,
         size_t log_bytes, const Config& config, AbortSignal& abort);

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(segments_.size()); }
  size_t buffer_bytes() const { return config_.staging_buffer_bytes; }
  int buffer_count() const { return config_.staging_buffer_count; }

  std::byte* buffer(int member, uint64_t round) const {
    return buffers_[member] + (round % config_.staging_buffer_count) * config_.staging_buffer_bytes;
  }
  // In a hierarchy a buffer holds data for the members of all hosts, so buffers are kWide times larger there: what goes
  // to one host is then still worth a frame. There are only two such buffers, because more would not let a member get
  // further ahead, and buffers that are filled in turn should stay in the caches. Both kinds of buffers lie in the same
  // memory, and a region uses one kind; memory that is not touched is not taken.
  static constexpr size_t kWide = 8;
  static constexpr uint64_t kWideBuffers = 2;
  std::byte* wide_buffer(int member, uint64_t round) const {
    return buffers_[member] + (round % kWideBuffers) * config_.staging_buffer_bytes * kWide;
  }
  std::byte* cell(int member, uint32_t id, uint32_t generation) const {
    return cells_[member] + (size_t{id} * 2 + generation % 2) * kCellStride;
  }
  // Scratch memory of the driver: one pointer for each member, for an algorithm that reads data of all members.
  std::vector<const void*>& inputs() { return inputs_; }
  // The order log of all members lives in the area of member 0; beside a mesh each has a part of it.
  std::byte* log(int member = 0) const { return area(member) + log_offset(); }

  // The next round number; each round is taken by exactly one collective. Driver only.
  uint64_t rounds_begun() const { return rounds_; }
  uint64_t take_rounds(uint64_t count) {
    const uint64_t first = rounds_;
    rounds_ += count;
    return first;
  }

  // Publishes that this member is through `phase` of the rounds below `count`.
  void publish(Phase phase, uint64_t count) {
    control(rank_).phases[static_cast<int>(phase)].value.store(count, std::memory_order_release);
    ring_sleepers();
  }

  // Waits until every other member has published `phase` up to `count`.
  Status await(Phase phase, uint64_t count) {
    for (int member = 0; member < size(); ++member) {
      if (member != rank_) HVD_TRY(await(member, phase, count));
    }
    return {};
  }
  Status await(int member, Phase phase, uint64_t count) {
    const std::atomic<uint64_t>& value = control(member).phases[static_cast<int>(phase)].value;
    if (value.load(std::memory_order_acquire) >= count) [[likely]]
      return {};
    return await_slowly(member, value, count);
  }
  // Waits until the buffer of `round` may be filled again.
  Status await_buffer(uint64_t round) { return await_round_of(round, static_cast<uint64_t>(buffer_count())); }
  Status await_wide_buffer(uint64_t round) { return await_round_of(round, kWideBuffers); }

  // Work that must go on while this member waits for others in shared memory. The function moves what it can without
  // waiting, says whether it is busy, and ends the wait by failing; then the abort signal is raised, or its caller
  // raises it. While it is busy every sleep is short. To be set before the first wait; called by the driver.
  using NetworkProgress = std::function<Status(bool& busy)>;
  void set_network_progress(NetworkProgress progress) { network_progress_ = std::move(progress); }
  // The driver calls `act` again and again while it waits here; the wait fails when `act` does. Before the first wait.
  void while_waiting(std::function<Status()> act) { while_waiting_ = std::move(act); }
  // Tells the others that this member is alive and waits for another one. Driver only.
  void beat() { control(rank_).beats.fetch_add(1, std::memory_order_relaxed); }

  // Whether the driver is a caller that has nothing else to do. It then polls for longer and yields its processor at
  // each turn, because on a busy machine a sleeping thread is woken far later. Driver only.
  void set_patient(bool patient) { patient_ = patient; }

  // Polls, then sleeps until ready(), now_us() reaches the deadline, or it is time to look at peers
  // (limits::kPeerCheckUs); returns ready()'s last answer. ready() must only read. poll: false for a wait that has
  // lasted long and is only continued here, which then sleeps at once.
  template <typename Ready>
  bool sleep_until(Ready&& ready, int64_t deadline_us, bool poll = true, const Awaited* awaited = nullptr);

  // Wakes members that sleep; call it after the store that they wait for.
  void ring_sleepers() {
    std::atomic_thread_fence(std::memory_order_seq_cst);  // pairs with the fence in sleep_on()
    for (int member = 0; member < size(); ++member) {
      if (member != rank_) ring_if_sleeping(member);
    }
  }
  // Wakes the other members that sleep, and this member's own driver.
  void ring_all() {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    for (int member = 0; member < size(); ++member) ring_if_sleeping(member);
  }
  // Wakes this member's own driver only.
  void ring_self() {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    ring_if_sleeping(rank_);
  }

  // Looks for members that ended: an aborted or lost one raises the abort signal. Departed ones are noted for
  // departed().
  Status check_members();
  // A member that left in order, or -1.
  int departed() const { return departed_; }
  // Whether a member has said that it aborts or leaves.
  bool has_ended(int member) const {
    return segments_[member]->header().state.load(std::memory_order_acquire) !=
           static_cast<uint32_t>(MemberState::running);
  }
  const std::string& label(int member) const { return labels_[member]; }
  std::string departure_sentence(int member) const;

  // Publishes the end of this member's epoch to its peers; only the first call counts. Any thread.
  void announce_end(MemberState state, const std::string& sentence);

  uint64_t sleeps() const { return sleeps_.load(std::memory_order_relaxed); }

 private:
  static size_t buffers_bytes(const Config& config) {
    return config.staging_buffer_bytes *
           std::max(kWide * kWideBuffers, static_cast<size_t>(config.staging_buffer_count));
  }
  // Waits until every member is through the round that had the buffer of `round` before, where there are `buffers` in
  // all.
  Status await_round_of(uint64_t round, uint64_t buffers) {
    return round < buffers ? Status() : await(Phase::finished, round - buffers + 1);
  }
  std::byte* area(int member) const { return segments_[member]->data() + offset_; }
  RegionControl& control(int member) const { return *controls_[member]; }
  void ring_if_sleeping(int member) {
    RegionControl::Doorbell& bell = control(member).bell;
    if (bell.sleepers.load(std::memory_order_relaxed) == 0) return;
    bell.rings.fetch_add(1, std::memory_order_release);
    futex_wake_all(&bell.rings);
  }
  // With more members than processors, to look at the clock costs less than to keep a processor from another member.
  WaitPolicy polling() const {
    const int64_t yield_us = patient_ ? config_.yield_us : config_.spin_us;
    const bool crowded = sharing_->crowded();
    return {.spin_us = config_.spin_us, .yield_us = yield_us, .spins = crowded ? 8 : 64, .yields_between = !crowded};
  }
  Status nap_with_progress(const std::function<bool()>& ready, bool poll);
  Status await_slowly(int member, const std::atomic<uint64_t>& value, uint64_t count);

  const int rank_;
  const std::vector<std::shared_ptr<Segment>> segments_;
  const std::vector<std::string> labels_;
  const size_t offset_;
  const Config config_;
  AbortSignal& abort_;
  NetworkProgress network_progress_;
  std::function<Status()> while_waiting_;
  std::vector<RegionControl*> controls_;
  std::vector<std::byte*> buffers_;
  std::vector<std::byte*> cells_;
  std::optional<ProcessorSharing> sharing_;  // set by the constructor; driver only
  std::vector<const void*> inputs_;          // scratch; driver only
  uint64_t rounds_ = 0;                      // driver only
  int departed_ = -1;                        // driver only
  bool patient_ = false;                     // driver only
  std::atomic<uint64_t> sleeps_{0};          // statistics; any order
  std::mutex end_mutex_;                     // lets one thread announce the end, once
};

template <typename Ready>
bool Region::sleep_until(Ready&& ready, int64_t deadline_us, bool poll, const Awaited* awaited) {
  if (ready()) return true;
  int64_t now = now_us();
  deadline_us = std::min(deadline_us, now + limits::kPeerCheckUs);
  const bool crowded = sharing_->crowded();
  if (crowded) sharing_->begin(poll ? awaited : nullptr);
  const bool came =
      poll && poll_until(polling(), now, deadline_us, ready, [&] { return crowded && sharing_->somebody_could_run(); });
  if (crowded) sharing_->end();
  if (came) return true;
  RegionControl::Doorbell& bell = control(rank_).bell;
  bell.sleepers.fetch_add(1, std::memory_order_relaxed);
  const bool answer =
      sleep_on(bell.rings, deadline_us, ready, [this] { sleeps_.fetch_add(1, std::memory_order_relaxed); });
  bell.sleepers.fetch_sub(1, std::memory_order_relaxed);
  return answer;
}

}  // namespace horovod
