// The members of a process set as what runs operations on devices sees them, and what the CPU's data plane does for it.
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

// Everything is for the driver.
struct Peers {
  int rank = 0;
  std::vector<std::string> labels;  // by rank
  std::vector<int> hosts;           // by rank: equal for members of one host, as users count hosts
  AbortSignal* abort = nullptr;
  int64_t timeout_us = 0;  // how long nothing may happen
  // Equally many bytes from each member, in the order of ranks. All members call it at the same place in their order.
  std::function<Status(const void* mine, size_t bytes, std::vector<std::byte>& all)> gather;
  // Fails when a member is lost. Does not block.
  std::function<Status()> look;
  // For waits on the host in the middle of a batch, to be called again and again: fails when something has that was
  // queued on the device before. Does not block.
  std::function<Status()> watch;

  int size() const { return static_cast<int>(labels.size()); }
  // Every member's row counts: counts[member * mine.size() + i].
  Status exchange_counts(const std::vector<int64_t>& mine, std::vector<int64_t>& counts) const {
    std::vector<std::byte> all;
    HVD_TRY(gather(mine.data(), mine.size() * sizeof(int64_t), all));
    counts.resize(mine.size() * labels.size());
    if (!counts.empty()) std::memcpy(counts.data(), all.data(), counts.size() * sizeof(int64_t));
    return {};
  }
};

}  // namespace horovod::cuda
