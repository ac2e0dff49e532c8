// From what the engine reports of its operations to the text of a timeline: events in the Trace Event Format
// (https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU), which Perfetto and
// chrome://tracing show. Pure: no clock, no file, no lock.
//
// Each tensor is a "process" of the trace, with two spans for each of its operations, one after the other:
//
//   NEGOTIATE_<OP>   from the first arrival that this rank knows of (its own or another one's) until all have arrived;
//                    inside, where the order log tells who arrives when, a tick with the number of each rank
//   <OP>             until the result is in place; its end tells dtype and shape. Inside:
//     QUEUE                    all have arrived, but the batch has not begun (earlier ones run, or no thread drives)
//     <PLANE>_<OP>             the algorithm; SHM, TCP, GLOO, or LOCAL in a world of one
//     <PLANE>_EAGER_<OP>       the same where small data travelled with the arrivals
//
// Operations that share a name at the same time (unnamed ones do) get processes of their own.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "collectives/op_spec.h"
#include "engine/order_log.h"

namespace horovod {

struct TimelineEvent {
  enum Kind : uint8_t {
    begun,      // this rank has submitted `operation`; `id` when it has one already
    planned,    // `operation` runs under `id` from now on
    arrived,    // `rank` has arrived at `id`
    withdrawn,  // `rank` has withdrawn its arrival at `id`
    agreed,     // all ranks have arrived at `id`
    cycle,      // a batch begins
    running,    // the batch of `operation` begins
    ended,      // `operation` is over; `text` says why it failed
  };
  static constexpr TensorId kNoId = ~TensorId{0};

  Kind kind = cycle;
  int64_t time_us = 0;
  uint64_t operation = 0;
  TensorId id = kNoId;
  int process_set = 0;
  int rank = 0;                     // of the world
  OpType type = OpType::allreduce;  // begun
  bool adasum = false;              // begun
  bool eager = false;               // running
  const char* plane = "";           // running
  std::string text;                 // begun: the tensor's name; ended: why it failed
  std::vector<TensorSpec> tensors;  // begun
};

class TimelineTrace {
 public:
  // Times are counted from start_us, which was start_since_epoch_us on the wall clock.
  TimelineTrace(int64_t start_us, int64_t start_since_epoch_us);

  // Events in the order in which they were recorded.
  void add(const TimelineEvent& event);
  // To be called when events are missing here: open spans end, and later events about them are ignored.
  void gap(uint64_t events, int64_t time_us);
  void finish(int64_t time_us);

  // The text since the last call: objects with ",\n" between them and, but for the very first, before them.
  std::string take() { return std::exchange(text_, {}); }
  uint64_t dropped() const { return dropped_; }

 private:
  using Key = std::pair<int, TensorId>;  // process set and id
  struct Open {
    int pid = 0;
    Key key;
    std::string op;       // "ALLREDUCE"
    std::string wire_op;  // "ALLREDUCE", "BCAST", "ADASUM_ALLREDUCE": what activities call it
    std::string tensors;  // dtype and shape as members of a JSON object
    int64_t since_us = 0;
    int64_t agreed_us = -1;  // < 0: not all have arrived
    std::string activity;    // the algorithm, once it runs
  };

  struct Last {  // the last event that was written for a process
    int64_t ns = 0;
    char phase = 'E';
  };

  void begin(const TimelineEvent& event);
  void agree(Open& open, int64_t time_us);
  void run(Open& open, const TimelineEvent& event);
  void end(Open& open, int64_t time_us, const std::string& why);
  void end_all(int64_t time_us, const std::string& why);
  void tick(const Open& open, int rank, int64_t time_us);
  int process_for(const std::string& name);
  int64_t moment_ns(int pid, char phase, int64_t time_us);
  void write(int pid, char phase, const std::string& name, int64_t time_us, const std::string& more = "");
  Open* find(uint64_t operation);
  Open* find(const Key& key);

  const int64_t start_us_;
  std::string text_;
  uint64_t dropped_ = 0;
  int64_t last_us_;
  std::unordered_map<uint64_t, Open> open_;
  std::map<Key, uint64_t> operation_of_;  // the latest of each id
  // Id that not all ranks have reached -> when each rank arrived there.
  std::map<Key, std::map<int, int64_t>> arrivals_;
  std::unordered_map<std::string, std::vector<int>> processes_;  // name -> its processes in the trace
  std::vector<bool> busy_{true};                                 // by process; 0 belongs to the whole trace
  std::vector<Last> last_{Last{}};                               // by process
};

}  // namespace horovod
