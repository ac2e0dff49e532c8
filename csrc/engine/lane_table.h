// The names and signatures that a member knows, and the lane in which operations of each run one after another.
//
// The table is bounded. A lane lives as long as it has an id or operations, and the number of ids is bounded. Lanes of
// unnamed operations live as long as their variant (one for each signature), of which a name has at most
// kUnnamedVariants.
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
  TensorId next_id = kNoId;  // on a member that has joined: the id that follows when `id` is free
  bool recalled = false;     // the coordinator has recalled `id`, which is free when `active` has run or is withdrawn
  Submission* active = nullptr;
  std::deque<Submission*> waiting;  // unnamed operations only: they come in order and may overlap

  // Whether `one` has arrived in the order log, under `id`.
  bool has_arrived(const Submission* one) const { return active == one && id != kNoId; }
};

struct NameEntry {
  struct Variant {
    uint64_t submitted = 0;
    uint64_t latest = 0;  // unnamed only: what `submitted` of the entry was when this variant was last used
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

  // Finds the lane of the operation, and its number if it has no name of its own. False while another operation of its
  // name is in flight.
  bool enter(Submission& submission);
  // To be called when the operation is over and nothing refers to it any more. May delete its lane.
  void leave(Submission& submission);
  // The lane of a named operation that the others agreed on without this member.
  Lane& learn(const OpSpec& spec) { return lane_for(names_[spec.name], spec); }
  // Forgets a lane that has neither an id nor an operation: the next operation of that name is announced anew.
  void forget_if_unused(Lane& lane);
  // Forgets all unnamed operations that are not in flight. Returns the ids of their lanes.
  std::vector<TensorId> forget_unnamed();
  // Calls `tell` with each kind of unnamed operations and how many of them were started.
  template <typename Tell>
  void unnamed(const Tell& tell) const {
    for (const auto& [name, entry] : names_) {
      if (entry.unnamed && entry.submitted > 0) tell(name, entry.submitted);
    }
  }
  size_t size() const;

 private:
  Lane& lane_for(NameEntry& entry, const OpSpec& spec);
  void make_room(NameEntry& entry);

  std::unordered_map<std::string, NameEntry> names_;
  std::unordered_map<const Lane*, std::unique_ptr<Lane>> retired_;  // lanes of forgotten variants while they are in use
};

}  // namespace horovod
