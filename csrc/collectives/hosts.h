// How the members of a mesh are spread over hosts. In a world where some share memory this fixes the order of summation
// for every algorithm: the members of a host in rank order, rounded to the dtype, then the hosts in the order of their
// first members. So a result is a function of the world and the inputs, whichever algorithm computes it.
#pragma once

#include <cstddef>
#include <vector>

#include "collectives/batch.h"

namespace horovod {

class Hosts {
 public:
  // host_of[member]: equal for members that share memory.
  explicit Hosts(const std::vector<int>& host_of);

  int count() const { return static_cast<int>(members_.size()); }
  int size() const { return static_cast<int>(host_.size()); }  // members of all hosts
  int host(int member) const { return host_[member]; }
  const std::vector<int>& members(int host) const { return members_[host]; }  // in rank order
  int leader(int host) const { return members_[host][0]; }

  // The member of `host` that does the work of `member` there: the one with the same place on its host, counted modulo
  // the members of `host`. On its own host it is the member itself.
  int counterpart(int host, int member) const {
    const std::vector<int>& candidates = members_[host];
    return candidates[place_[member] % candidates.size()];
  }

  // Reduces all members' elements to `output` in the order above. inputs: by member, already prescaled. output may be
  // one of the inputs.
  void reduce(const Reduction& reduction, std::byte* output, const void* const* inputs, int64_t count) const;

 private:
  // host_[member]: its host; hosts are numbered in the order of their first members
  std::vector<int> host_;
  std::vector<size_t> place_;              // place_[member]: its place among the members of its host
  std::vector<std::vector<int>> members_;  // members_[host]: its members
};

// Reduces the elements of all `size` members: in the order of `hosts`, or in that of the ranks where hosts is null
// because no members share memory.
void reduce_members(const Hosts* hosts, const Reduction& reduction, std::byte* output, const void* const* inputs,
                    int size, int64_t count);

}  // namespace horovod
