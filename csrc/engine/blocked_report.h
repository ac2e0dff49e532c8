// What a rank that makes no progress has in flight. The coordinator compares all ranks' reports to find ranks that wait
// for each other (coordinator/core/agreement/standing.py).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace horovod {

// An operation that was started and waits for other ranks.
struct Unfinished {
  uint64_t number = 0;  // its number among all operations that this rank has started
  int process_set = 0;
  std::string name;       // the name by which the coordinator knows it
  bool awaited = false;   // whether a thread of the script waits for it
  bool by_graph = false;  // see Submission
};

// How many operations of a process set's order log this rank has run. All members run the same ones in the same order,
// so of two members the one with the larger number has run all that the other has, and more.
struct Executed {
  int process_set = 0;
  uint64_t count = 0;
};

// How many unnamed operations of one kind, such as "allreduce.noname", this rank has started in a process set since all
// ranks last joined. They match by these numbers.
struct Unnamed {
  int process_set = 0;
  std::string name;
  uint64_t count = 0;
};

struct BlockedReport {
  uint64_t started = 0;      // operations that this rank has started so far
  bool all_threads = false;  // every thread of the script that is known to use Horovod is blocked, and no graph goes on
  bool moving = false;       // a batch runs, or an operation is being withdrawn, so what follows is about to change
  bool cut_short = false;    // there are more unfinished operations than `unfinished` holds
  int64_t cpu_us = 0;        // processor time that this process has used so far
  std::vector<Executed> executed;
  std::vector<Unfinished> unfinished;  // oldest first
  std::vector<Unnamed> unnamed;        // of at most kMostUnnamed kinds

  static constexpr size_t kMostUnnamed = 64;
};

}  // namespace horovod
