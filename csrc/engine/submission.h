// An operation with what the engine keeps about it while it is in flight.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "collectives/operation.h"
#include "engine/order_log.h"

namespace horovod {

class Completions;
struct Lane;
struct NameEntry;

// Which thread starts an operation, and when, as far as its caller has a wish.
enum class Start : uint8_t {
  gathered,   // the background thread, after a moment in which more operations may come that run with it
  at_once,    // the background thread, without that moment
  by_waiter,  // the calling thread: it waits next, so the background thread is left asleep
};

// Guarded by the communicator's lock but for the base and `running`.
struct Submission final : Operation {
  Lane* lane = nullptr;
  NameEntry* entry = nullptr;
  std::optional<uint64_t> unnamed;   // its number among those without a name of their own
  uint64_t number = 0;               // of all operations that this rank has started
  bool zeros = false;                // what this member contributes after it has joined; no caller waits for it
  std::optional<Status> withdrawal;  // the order log was asked for it; ends with this if granted; ok: announced again
  bool by_graph = false;             // a framework's graph started it, which may start others meanwhile
  bool unawaited = false;            // it may stand for long while nobody waits for it, which is no stall
  int64_t waited_since_us = 0;       // when a thread first waited for it
  int64_t seen_us = 0;               // when it was first seen in flight: by a thread that waits, or by the driver
  int64_t reported_us = 0;           // when the coordinator was last told that it does not get on
  std::atomic<bool> running{false};  // every rank has arrived; set by the driver (release) before the batch runs
  // Called once when it is done, by the thread of `completions` (set where this is); not if it was not accepted.
  std::function<void(const std::shared_ptr<Submission>&)> on_done;
  Completions* completions = nullptr;

  bool is_done() const { return state.load(std::memory_order_acquire) == done; }
  // As the coordinator knows it.
  std::string announced_name() const { return unnamed ? spec.name + "." + std::to_string(*unnamed) : spec.name; }
};

using OnDone = decltype(Submission::on_done);

// What a decision of the tensor table makes its caller do. Effects are carried out in their order, before the table is
// asked anything else.
struct Effect {
  enum Kind : uint8_t {
    arrive,        // `submission` arrives in the order log under `id`
    withdraw,      // the order log is asked to withdraw the arrival at `id`
    announce,      // the coordinator is told that `submission` is ready, and will give it an id
    tell_blocked,  // the coordinator is told that `submission` does not get on
    recalled,      // the coordinator is told that `ids`, which it has recalled, are free on this member
    tell_joined,   // the coordinator is told that this member has joined in `round`, and whether `without_zeros`
    complete,      // `done` is over and leaves the table; done->status says how it ended
  };
  Kind kind;
  TensorId id = 0;
  Submission* submission = nullptr;
  std::shared_ptr<Submission> done;
  std::vector<TensorId> ids;
  uint32_t round = 0;
  bool without_zeros = false;
};
using Effects = std::vector<Effect>;

}  // namespace horovod
