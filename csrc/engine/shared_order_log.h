// The order log of members that share memory: the member that completes a count appends to the log itself, so agreement
// costs one atomic addition and no message.
//
// Layout (in the area of member 0, see Region):
//   words[id]      (generation << 32) | arrivals. Members add 1; the last one starts the next generation and
//                  appends the id. An arrival is withdrawn by compare-and-swap within one generation.
//   ring[i]        of log index i, and of i + kMaxIds in the next lap:
//     agreed       (lap << 32) | (alone << 31) | id. The appender takes the first place of the lap before, by
//                  compare-and-swap, so there is no counter beside it. alone: its caller waits for it and for nothing
//                  else, so if a batch begins here, it ends here.
//     end          where a batch begins at i that is not alone: the log index at which it ends. The first member ready
//                  to run it decides that by compare-and-swap; any member computes it from what the log holds
//                  then, so batches grow while others work. It is beside `agreed` because a reader of one reads the
//                  other next.
//
// Most of the time of a small operation goes into cache lines that come from another processor. An operation for which
// members wait takes two of them here: its word, and its place in the ring, which waiting members only read.
//
// Small operations need no data phase: their bytes are in cells before the arrival (collectives/shared/eager.h), and
// poll() computes the results. Decisions depend only on what is agreed and on cells that all members read, so all of
// them cut the log into the same batches: the decider ends a batch where small operations meet others, and poll() where
// rows that did not fit into a cell meet rows that did.
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

  Status arrive(TensorId id) override { return arrive(id, nullptr, false); }
  Status arrive_with(TensorId id, Operation& operation) override;
  Status withdraw(TensorId id) override;
  Status poll(LogEvent& event) override;
  Status wait(int64_t until_us) override;
  void wake() override;

 private:
  struct Own {  // this member's last arrival at an id
    // Released when all that the arrival leaves for others is written; acquired by this member's own driver. The words
    // of the log order the same accesses, but through other processes, which C++ and the sanitizers can't see.
    std::atomic<uint32_t> generation{0};
    // The operation, if its bytes are in the cells; else null. Written before `generation`, read after it.
    std::atomic<Operation*> small{nullptr};

    bool is_small() const {
      (void)generation.load(std::memory_order_acquire);
      return small.load(std::memory_order_relaxed) != nullptr;
    }
  };

  Status arrive(TensorId id, Operation* operation, bool alone);
  void append(TensorId id, bool alone);
  bool entry(uint64_t index, TensorId& id, bool* alone = nullptr) const;
  uint64_t end_of_batch(uint64_t first);
  bool is_complete(TensorId id) const;
  Status finish(TensorId id, bool complete);

  Region& region_;
  const FuseRule fuse_;
  AbortSignal& abort_;
  Memory& memory_;
  std::vector<Own> own_;               // by id
  std::atomic<uint64_t> cursor_{0};    // next log index to run; the driver writes, append() takes it as a lower bound
  std::atomic<uint64_t> appended_{0};  // behind this member's last entry: a lower bound too. Both: any memory order
  std::vector<TensorId> ready_;        // scratch of poll()
  std::atomic<bool> woken_{false};     // set by wake(), cleared by wait()
  std::mutex mutex_;                   // guards withdrawn_
  std::vector<TensorId> withdrawn_;
  std::atomic<bool> any_withdrawn_{false};  // a hint, so that poll() need not lock; set with mutex_ held
};

}  // namespace horovod
