#include "transport/region.h"

#include <algorithm>
#include <cstring>

#include <poll.h>

#include "base/interrupt.h"

namespace horovod {
namespace {

size_t page_aligned(size_t bytes) { return (bytes + 4095) / 4096 * 4096; }

// After this many times the limit, a member without progress is blamed even if it shows signs of life.
constexpr int64_t kMostPatience = 4;

}  // namespace

size_t Region::area_bytes(const Config& config, size_t log_bytes) {
  return log_offset() + page_aligned(log_bytes) + buffers_bytes(config) + page_aligned(kEagerIds * 2 * kCellStride);
}

Region::Region(int rank, std::vector<std::shared_ptr<Segment>> segments, std::vector<std::string> labels, size_t offset,
               size_t log_bytes, const Config& config, AbortSignal& abort)
    : rank_(rank),
      segments_(std::move(segments)),
      labels_(std::move(labels)),
      offset_(offset),
      config_(config),
      abort_(abort),
      inputs_(segments_.size()) {
  std::vector<std::byte*> areas;
  std::vector<WaitHint*> hints;
  for (int member = 0; member < size(); ++member) {
    controls_.push_back(reinterpret_cast<RegionControl*>(area(member)));
    areas.push_back(area(member));
    hints.push_back(&control(member).waits);
    buffers_.push_back(area(member) + log_offset() + page_aligned(log_bytes));
    cells_.push_back(buffers_.back() + buffers_bytes(config));
  }
  sharing_.emplace(rank, std::move(areas), log_offset() + page_aligned(log_bytes), std::move(hints));
}

// Waits for at most limits::kPeerCheckUs, or until there is something to do. A patient member yields the processor at
// first, and moves what the network has to move at each turn: the member that it waits for here often waits for that.
Status Region::nap_with_progress(const std::function<bool()>& ready, bool poll) {
  const int64_t start_us = now_us();
  const int64_t end_us = start_us + limits::kPeerCheckUs;
  Wait wait({.yield_us = poll && patient_ ? config_.yield_us : 0});
  bool busy = false;
  for (int64_t now = start_us; now < end_us; now = now_us()) {
    beat();
    HVD_TRY(network_progress_(busy));
    if (ready()) return {};
    if (wait.phase(now) != Wait::sleeps) {
      wait.turn(now);
    } else if (sleep_until(ready, busy ? std::min(end_us, now + limits::kNetworkTurnUs) : end_us, poll && !patient_)) {
      return {};
    }
  }
  return {};
}

Status Region::await_slowly(int member, const std::atomic<uint64_t>& value, uint64_t count) {
  const auto ready = [&] { return value.load(std::memory_order_acquire) >= count || abort_.raised(); };
  const int64_t started = now_us();
  uint64_t last = value.load(std::memory_order_relaxed);
  uint32_t last_beat = control(member).beats.load(std::memory_order_relaxed);
  int64_t last_change = started;
  int64_t last_sign = started;  // the last sign of life: a member that itself waits for others is not to blame
  for (bool first = true;; first = false) {
    if (network_progress_) {
      HVD_TRY(nap_with_progress(ready, first));
    } else {
      const Awaited awaited{member, &value, count};
      sleep_until(ready, INT64_MAX, first, &awaited);
    }
    if (value.load(std::memory_order_acquire) >= count) return {};
    if (abort_.raised()) return abort_.cause();
    HVD_TRY(check_members());
    if (while_waiting_) {
      // Raised here, so that transfers which are under way at the same time end as well.
      if (Status failed = while_waiting_(); !failed.ok() && failed.code() != Code::left) {
        abort_.raise(failed);
        return abort_.cause();
      }
    }
    const int64_t now = now_us();
    if (const uint64_t current = value.load(std::memory_order_relaxed); current != last) {
      last = current;
      last_change = last_sign = now;
    }
    if (const uint32_t beat = control(member).beats.load(std::memory_order_relaxed); beat != last_beat) {
      last_beat = beat;
      last_sign = now;
    }
    const int64_t limit_us = config_.progress_timeout_ms * 1000;
    if (now - last_sign > limit_us || now - last_change > kMostPatience * limit_us) {
      Status late(Code::timeout, error_code::no_progress,
                  capitalized(labels_[member]) + " has made no progress for " +
                      std::to_string(config_.progress_timeout_ms) +
                      " ms in an operation that every rank had started; it is stopped or overloaded.");
      abort_.raise(late);
      return abort_.cause();
    }
    if (t_interrupt_hook && t_interrupt_hook()) {
      abort_.raise({Code::interrupted, error_code::interrupted,
                    capitalized(labels_[rank_]) + " was interrupted by a signal during an operation."});
      return abort_.cause();
    }
  }
}

Status Region::check_members() {
  if (abort_.raised()) return abort_.cause();
  for (int member = 0; member < size(); ++member) {
    if (member == rank_) continue;
    const SegmentHeader& header = segments_[member]->header();
    auto state = static_cast<MemberState>(header.state.load(std::memory_order_acquire));
    if (state == MemberState::running && segments_[member]->pidfd() >= 0) {
      pollfd process{segments_[member]->pidfd(), POLLIN, 0};
      if (poll(&process, 1, 0) == 1) {
        // The member may have announced its end between the two looks.
        state = static_cast<MemberState>(header.state.load(std::memory_order_acquire));
        if (state == MemberState::running) {
          abort_.note_lost(labels_[member], true);
          abort_.raise({Code::aborted, error_code::peer_lost,
                        capitalized(labels_[member]) +
                            " was lost: its process ended without leaving the job (killed or crashed)."});
          return abort_.cause();
        }
      }
    }
    if (state == MemberState::aborted) {
      abort_.raise({Code::aborted, departure_sentence(member)});
      return abort_.cause();
    }
    if (state == MemberState::left && departed_ < 0) departed_ = member;
  }
  return {};
}

std::string Region::departure_sentence(int member) const {
  const char* const cause = segments_[member]->header().cause;
  const size_t bytes = strnlen(cause, SegmentHeader::kCauseBytes);
  if (bytes > 0) return std::string(cause, bytes);
  return coded(error_code::shut_down, capitalized(labels_[member]) + " has ended without a reason.");
}

void Region::announce_end(MemberState state, const std::string& sentence) {
  const std::lock_guard<std::mutex> lock(end_mutex_);
  SegmentHeader& header = segments_[rank_]->header();
  if (header.state.load(std::memory_order_relaxed) != static_cast<uint32_t>(MemberState::running)) return;
  const std::string cause = shortened(sentence, SegmentHeader::kCauseBytes - 1);
  std::memcpy(header.cause, cause.c_str(), cause.size() + 1);
  header.state.store(static_cast<uint32_t>(state), std::memory_order_release);
  ring_sleepers();
}

}  // namespace horovod
