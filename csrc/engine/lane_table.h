// The names and signatures that a member knows, and the lane in which operations of each run one after another.
//
// What is kept is bounded: a lane lives as long as it has an id or operations, and ids are bounded. Unnamed operations
// are numbered, so their lanes live as long as their variant, and of these there are at most kUnnamedVariants a name.
//
// Pure: no thread, lock or clock.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/submission.h"

namespace horovod {

// Operations of one name and signature run one after another under one id.
struct Lane {
  static constexpr TensorId kNoId = ~TensorId{0};
  OpSpec spec;
  size_t users = 0;  // the number of operations that refer to this lane
  TensorId id = kNoId;
  TensorId next_id = kNoId;  // of a member that has joined: known already, while `id` is not free yet
  bool recalled = false;     // the coordinator has recalled `id`, which is free when `active` has run or is withdrawn
  Submission* active = nullptr;
  std::deque<Submission*> waiting;  // unnamed operations only: they come in order and may overlap

  // In the order log, where `active` is under `id` from the moment that there is one.
  bool has_arrived(const Submission* one) const { return active == one && id != kNoId; }
};

struct NameEntry {
  struct Variant {
    uint64_t submitted = 0;
    uint64_t latest = 0;  // unnamed only: `submitted` of the entry when it was last used
    std::vector<std::unique_ptr<Lane>> lanes;
  };
  bool unnamed = false;
  bool in_flight = false;         // named only
  uint64_t submitted = 0;         // unnamed only: numbers the announcements
  std::vector<Variant> variants;  // one for each signature
};

class LaneTable {
 public:
  static constexpr uint64_t kUnnamedLanes = 32;    // how many unnamed operations of one signature may overlap
  static constexpr size_t kUnnamedVariants = 512;  // how many signatures of one kind of unnamed operations are known

  // Finds the operation its lane, and its number if it has no name of its own. False while another one of its name is
  // in flight.
  bool enter(Submission& submission);
  // The operation is over, and nothing refers to it any more. Its lane may be gone after that.
  void leave(Submission& submission);
  // The lane of a named operation that the others agreed on without this member.
  Lane& learn(const OpSpec& spec) { return lane_for(names_[spec.name], spec); }
  // Forgets a lane that has neither an id nor an operation: the next operation of that name is announced anew.
  void forget_if_unused(Lane& lane);
  // Forgets all unnamed operations, but for what is in flight. The ids that their lanes had.
  std::vector<TensorId> forget_unnamed();
  size_t size() const;

 private:
  Lane& lane_for(NameEntry& entry, const OpSpec& spec);
  void make_room(NameEntry& entry);

  std::unordered_map<std::string, NameEntry> names_;
  std::unordered_map<const Lane*, std::unique_ptr<Lane>> retired_;  // lanes of forgotten variants while they are in use
};

}  // namespace horovod
