// Chooses the connections over which the members of a mesh's order log talk to its sequencer, member 0.
//
// In a full mesh they form a star: each member is connected to the sequencer. In a sparse mesh they form a binomial
// tree, whose edges are connections between partners (collectives/partners.h). With p the largest power of two up to
// the number of members, the parent of a member below p has the same number without its lowest bit set, and the parent
// of a member from p on is the member p places before it. So no member has more than log2 n + 1 children, or is further
// away from the sequencer than that.
#pragma once

#include <bit>
#include <vector>

namespace horovod {

class LogTree {
 public:
  LogTree(int size, int member, bool star)
      : member_(member),
        power_(static_cast<int>(std::bit_floor(static_cast<unsigned>(size)))),
        star_(star || size < 3) {
    for (int other = 1; other < size; ++other) {
      if (parent_of(other) == member) children_.push_back(other);
    }
  }

  bool is_star() const { return star_; }
  int parent() const { return parent_of(member_); }               // of the sequencer: itself
  const std::vector<int>& children() const { return children_; }  // ascending

  // The child by way of which `other` is reached: the child itself or one that stands below it. -1: there is none.
  int towards(int other) const {
    for (int parent = 0; other != 0; other = parent) {
      parent = parent_of(other);
      if (parent == member_) return other;
    }
    return -1;
  }

 private:
  int parent_of(int member) const {
    if (star_ || member == 0) return 0;
    return member >= power_ ? member - power_ : member & (member - 1);
  }

  const int member_;
  const int power_;  // the largest power of two up to the number of members
  const bool star_;
  std::vector<int> children_;
};

}  // namespace horovod
