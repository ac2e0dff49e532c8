// The agreed sequence of operations. Ranks submit in any order and at any time; every rank sees the same batches in the
// same order, so collectives that run in this order can't deadlock.
//
// Threads: arrive() and withdraw() from any thread; poll() and wait() from the driver only. poll() never blocks.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/status.h"

namespace horovod {

struct Operation;

using TensorId = uint32_t;
inline constexpr TensorId kMaxIds = 1u << 14;

struct LogEvent {
  enum Kind : uint8_t {
    none,       // nothing new
    batch,      // every rank has submitted `ids`; run them now, as one fused operation
    withdrawn,  // the single id in `ids` was withdrawn before it was agreed; it will not appear
  };
  Kind kind = none;
  std::vector<TensorId> ids;
  bool completed = false;  // batch: all its results are in place already, see arrive_with(); else it has to be run
};

// Events that the log tells the timeline: an arrival was counted, an arrival was withdrawn, or all ranks have arrived.
enum class Arrival : uint8_t { counted, withdrawn, last };

// What arrive() and withdraw() answer to an id that does not exist.
inline Status bad_id(TensorId id) {
  return {Code::invalid_argument, error_code::unexpected_data,
          "Id " + std::to_string(id) + " is outside of the order log's 0 to " + std::to_string(kMaxIds - 1) + "."};
}

// How many of the `count` leading ids may run as one batch (at least 1). Pure: it must give the same answer on every
// rank.
using FuseRule = std::function<size_t(const TensorId* ids, size_t count)>;

class OrderLog {
 public:
  virtual ~OrderLog() = default;

  // Says that this rank has `id` ready. To be called once for each run of an id: again only after its batch was polled.
  virtual Status arrive(TensorId id) = 0;

  // Does the same, and the log may read the operation's input at once and send it along when it is small. If it does so
  // on all ranks, poll() writes the result, and the batch comes as `completed`: the log cuts batches where that
  // changes, alike on every rank. The operation stays where it is until its batch or its withdrawal was polled.
  virtual Status arrive_with(TensorId id, Operation& operation) {
    (void)operation;
    return arrive(id);
  }

  // Asks to withdraw an arrival. The answer comes through poll(): either `withdrawn`, or a batch with the id in it
  // when the last rank arrived first.
  virtual Status withdraw(TensorId id) = 0;

  virtual Status poll(LogEvent& event) = 0;

  // Blocks until poll() may have news, wake() was called, the engine aborted, or now_us() reaches `until_us`. Notices
  // lost and departed peers; fails with the sentence that names them.
  virtual Status wait(int64_t until_us) = 0;

  // Ends a running or the next wait() early. Any thread.
  virtual void wake() = 0;
};

}  // namespace horovod
