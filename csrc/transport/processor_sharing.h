// For members that share memory and are more than the processors: tells which member waits on which processor, and for
// what.
//
// A member that waits yields its processor. But to switch processes costs more than a small operation, so it looks
// first: when every member that was last seen on this processor waits for something that has not come, only a member on
// another processor can bring it, and polling on is faster than yielding. With one operation after another, a processor
// then switches once for each operation and not twice: each rank ends one operation and starts the next before it
// yields.
//
// These words are hints. A wrong one (a member has moved, or its two words were read while they changed) costs one turn
// of polling, which ends after Config::spin_us.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace horovod {

// At the start of a member's area. Its owner writes, the others read, in any order. One line is for what seldom
// changes.
struct WaitHint {
  alignas(64) std::atomic<uint32_t> processor;  // 1 + that on which the owner last waited; 0: it has not waited
  // For which word the owner waits, 1 + (member << 48 | offset in that member's area), and what it must reach; 0: it
  // does not wait, or has not said for what.
  alignas(64) std::atomic<uint64_t> word;
  std::atomic<uint64_t> value;
};

// What a wait is for, in most cases: that a word in a member's area reaches a value.
struct Awaited {
  int member;
  const std::atomic<uint64_t>* word;
  uint64_t value;
};

// Driver only.
class ProcessorSharing {
 public:
  // areas[i] is that of member i, of `bytes` bytes each, and has its hint at hints[i].
  ProcessorSharing(int rank, std::vector<std::byte*> areas, size_t bytes, std::vector<WaitHint*> hints);

  // Whether there are more members than processors.
  bool crowded() const { return crowded_; }
  // To be called before and after a wait in which this member polls; null: it does not say for what it waits.
  void begin(const Awaited* awaited);
  void end() { hints_[rank_]->word.store(0, std::memory_order_relaxed); }
  // Whether a member that was last seen on this processor could go on if it got the processor. To be asked between
  // begin() and end().
  bool somebody_could_run() const;

 private:
  int size() const { return static_cast<int>(hints_.size()); }
  bool could_run(int member) const;
  void stay_at(int processor);

  const int rank_;
  const std::vector<std::byte*> areas_;
  const size_t bytes_;
  const std::vector<WaitHint*> hints_;
  const bool crowded_;
};

}  // namespace horovod
