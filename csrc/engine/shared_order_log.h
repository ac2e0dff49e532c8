// The order log of members that share memory: the member that completes a count appends to the log itself, so agreement
// costs one atomic addition and no message.
//
// Layout (in the area of member 0, see Region):
//   words[id]      (generation << 32) | arrivals. Members add 1; the last one starts the next generation and
//                  appends the id. Taking an arrival back is a compare-and-swap within one generation.
//   ring[i]        of log index i, and of i + kMaxIds in the next lap:
//     agreed       (lap << 32) | (alone << 31) | id. The appender takes the first place of the lap before, by
//                  compare-and-swap, so there is no counter beside it. alone: its caller waits for it and for nothing
//                  else, so if a batch begins here, it ends here.
//     end          where a batch begins at i that is not alone: the log index at which it ends. The first member ready
//                  to run it decides that by compare-and-swap; any member computes it from what the log holds
//                  then, so batches grow while others work. It is beside `agreed` because whoever reads one wants the
//                  other.
//
// A line of the cache that comes from another processor is most of what a small operation costs. One that somebody
// waits for takes two here: its word, and its place in the ring, which those who wait only read.
//
// Why nothing overflows: a member arrives at an id again only after it has run it, so no member is ever behind by more
// than one log entry for each id, and the ring has as many places as there are ids.
#pragma once

#include <atomic>
#include <mutex>

#include "engine/order_log.h"
#include "transport/region.h"

namespace horovod {

class SharedOrderLog final : public OrderLog {
 public:
  struct alignas(16) Entry {
    std::atomic<uint64_t> agreed;
    std::atomic<uint64_t> end;
  };
  struct Memory {
    alignas(64) std::atomic<uint64_t> words[kMaxIds];
    alignas(64) Entry ring[kMaxIds];
  };

  SharedOrderLog(Region& region, FuseRule fuse, AbortSignal& abort);

  // The generation that this member's next arrival belongs to. It can't change before that arrival.
  uint32_t next_generation(TensorId id) const {
    return static_cast<uint32_t>(memory_.words[id].load(std::memory_order_relaxed) >> 32);
  }
  // The generation of this member's last arrival.
  uint32_t generation(TensorId id) const { return generations_[id].load(std::memory_order_acquire); }

  Status arrive(TensorId id) override { return arrive(id, false); }
  Status arrive_with(TensorId id, Operation& operation) override;
  Status withdraw(TensorId id) override;
  Status poll(LogEvent& event) override;
  Status wait(int64_t until_us) override;
  void wake() override;

 private:
  Status arrive(TensorId id, bool alone);
  void append(TensorId id, bool alone);
  bool entry(uint64_t index, TensorId& id, bool* alone = nullptr) const;
  uint64_t end_of_batch(uint64_t first);

  Region& region_;
  const FuseRule fuse_;
  AbortSignal& abort_;
  Memory& memory_;
  // Of this member's last arrival. Released when all that it leaves for others is written, acquired by its own driver:
  // the words of the log order that as well, but by way of other processes, of which C++ and the sanitizers know
  // nothing.
  std::vector<std::atomic<uint32_t>> generations_;
  std::atomic<uint64_t> cursor_{0};    // next log index to run; the driver writes, append() takes it as a lower bound
  std::atomic<uint64_t> appended_{0};  // behind this member's last entry: a lower bound too. Both: any order
  std::vector<TensorId> ready_;        // scratch of poll()
  std::atomic<bool> woken_{false};     // set by wake(), cleared by wait()
  std::mutex mutex_;                   // guards withdrawn_
  std::vector<TensorId> withdrawn_;
  std::atomic<bool> any_withdrawn_{false};  // hint so that poll() need not lock; set under mutex_
};

}  // namespace horovod
