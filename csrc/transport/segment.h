// The memory that one member shares with its local peers.
//
// It is a memfd: it has no name in any file system, so nothing is left behind however a process dies, and a small or
// read-only /dev/shm does not matter (docs/adr/0001-memfd-segments.md). Peers of the same user open it as
// /proc/<pid>/fd/<n>; a random nonce in the header proves that they found the right one. In-process segments (several
// engines in one process) are plain memory that lives as long as anybody has them open.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "base/status.h"

namespace horovod {

enum class MemberState : uint32_t { running = 0, left = 1, aborted = 2 };

// The first page of a segment. Its owner alone writes it, except `attached`; peers read it.
struct SegmentHeader {
  static constexpr uint64_t kMagic = 0x36766f726f484d53;  // changes with the layout of the segment
  static constexpr size_t kCauseBytes = 2048;

  uint64_t magic;
  uint64_t nonce;
  uint64_t bytes;
  std::atomic<uint32_t> state;  // MemberState; released after `cause` is written, acquired by readers of `cause`
  // Peers that have opened it: each adds 1, in release order, and wakes the owner (futex), which acquires.
  std::atomic<uint32_t> attached;
  char cause[kCauseBytes];  // NUL-terminated sentence, valid when state is not running; written once
};

class Segment {
 public:
  // Makes a new segment of this process.
  static std::shared_ptr<Segment> create(size_t bytes, bool in_process, Status& status);
  // Opens a peer's segment by the address that the peer announced.
  static std::shared_ptr<Segment> open(const std::string& address, size_t bytes, Status& status);

  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  // Owner only: sleeps until `peers` have opened the segment, for timeout_us at most. Returns how many have.
  uint32_t await_attached(uint32_t peers, int64_t timeout_us) const;

  const std::string& address() const { return address_; }
  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  SegmentHeader& header() const { return *reinterpret_cast<SegmentHeader*>(data_); }
  // A descriptor that is readable when the owner's process has ended (pidfd_open(2)); -1 when the owner is this process
  // or unknown.
  int pidfd() const { return pidfd_; }

 private:
  Segment() = default;

  std::string address_;
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
  int fd_ = -1;
  int pidfd_ = -1;
  bool mapped_ = false;              // munmap on destruction
  uint64_t in_process_nonce_ = 0;    // of the owner's object of an in-process segment
  std::shared_ptr<Segment> origin_;  // of an opened in-process segment: the owner's object
  int owner_process_ = 0;            // the process that made this object; a forked child must not touch it
};

}  // namespace horovod
