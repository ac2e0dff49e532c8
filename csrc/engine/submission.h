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

// Which thread starts an operation, and when, as far as its caller says so.
enum class Start : uint8_t {
  gathered,   // the background thread, after a moment in which more operations may come that run with it
  at_once,    // the background thread, without that moment
  by_waiter,  // the calling thread: it waits next, so the background thread is left asleep
};

// Guarded by the lock of the communicator, except the members of Operation and `running`.
struct Submission final : Operation {
  Lane* lane = nullptr;
  NameEntry* entry = nullptr;
  std::optional<uint64_t> unnamed;   // its number among unnamed operations; nullopt: it has a name
  uint64_t number = 0;               // its number among all operations that this rank has started
  bool zeros = false;                // zeros that this member contributes after it has joined; no caller waits for them
  std::optional<Status> withdrawal;  // set when the order log was asked to withdraw the arrival: how the operation then
                                     // ends; ok: it is announced again
  bool by_graph = false;             // a framework's graph started it, which may start others meanwhile
  bool unawaited = false;            // whether it may take long while no thread waits for it, which is no stall
  int64_t waited_since_us = 0;       // when a thread first waited for it
  int64_t seen_us = 0;               // when a waiting thread or the driver first saw it in flight
  int64_t reported_us = 0;           // when the coordinator was last told that it makes no progress
  std::atomic<bool> running{false};  // every rank has arrived; set by the driver (release) before the batch runs
  // Called once when the operation is done, by the thread of `completions` (which is set where this is); never for an
  // operation that was not accepted.
  std::function<void(const std::shared_ptr<Submission>&)> on_done;
  Completions* completions = nullptr;

  bool is_done() const { return state.load(std::memory_order_acquire) == done; }
  // The name under which the coordinator knows the operation.
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
    tell_blocked,  // the coordinator is told that `submission` makes no progress
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
