// The members of a process set, as the GPU backends need them: who they are, and the functions of the CPU's data plane
// through which a backend exchanges small values with them and learns that one is lost.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "base/abort.h"
#include "base/status.h"

namespace horovod::cuda {

// Only the driver thread calls these functions.
struct Peers {
  int rank = 0;
  std::vector<std::string> labels;  // by rank
  std::vector<int> hosts;           // by rank: equal for members of one host, as users count hosts
  AbortSignal* abort = nullptr;
  int64_t timeout_us = 0;  // a wait fails after so long without any progress
  // Gathers `bytes` bytes from each member into `all`, in the order of ranks. Every member calls it with the same
  // `bytes`, at the same place in its sequence of operations.
  std::function<Status(const void* mine, size_t bytes, std::vector<std::byte>& all)> gather;
  // Fails if a member is lost. Does not block.
  std::function<Status()> look;
  // A wait on the host in the middle of a batch calls this again and again: it fails when an operation that was queued
  // on the device earlier has failed. Does not block.
  std::function<Status()> watch;

  int size() const { return static_cast<int>(labels.size()); }
  // Gathers every member's row counts: counts[member * mine.size() + i].
  Status exchange_counts(const std::vector<int64_t>& mine, std::vector<int64_t>& counts) const {
    std::vector<std::byte> all;
    HVD_TRY(gather(mine.data(), mine.size() * sizeof(int64_t), all));
    counts.resize(mine.size() * labels.size());
    if (!counts.empty()) std::memcpy(counts.data(), all.data(), counts.size() * sizeof(int64_t));
    return {};
  }
};

}  // namespace horovod::cuda
