// Row counts for allgather and alltoall over shared memory: each member knows only its own, and learns the others'
// here.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <vector>

#include "collectives/batch.h"
#include "transport/region.h"

namespace horovod::shared {

// Every member contributes `mine` (the same count everywhere); returns all members' numbers, member-major.
inline Status exchange_counts(Region& region, const std::vector<int64_t>& mine, std::vector<int64_t>& all) {
  const size_t count = mine.size();
  all.assign(count * static_cast<size_t>(region.size()), 0);
  const size_t per_round = region.buffer_bytes() / sizeof(int64_t);
  for (size_t begin = 0; begin < count; begin += per_round) {
    const size_t bytes = std::min(per_round, count - begin) * sizeof(int64_t);
    const uint64_t round = region.take_rounds(1);
    HVD_TRY(region.await_buffer(round));
    std::memcpy(region.buffer(region.rank(), round), mine.data() + begin, bytes);
    region.publish(Phase::posted, round + 1);
    for (int member = 0; member < region.size(); ++member) {
      if (member != region.rank()) HVD_TRY(region.await(member, Phase::posted, round + 1));
      std::memcpy(all.data() + static_cast<size_t>(member) * count + begin, region.buffer(member, round), bytes);
    }
    region.publish(Phase::finished, round + 1);
  }
  return {};
}

// The same for `mine`, the counts of a whole batch. If every operation's counts came with the arrivals in the order log
// (Operation::told_rows), they are taken from there and nothing is exchanged. All members have seen the same arrivals,
// so all of them exchange or none does.
inline Status learn_counts(Region& region, Batch batch, const std::vector<int64_t>& mine, std::vector<int64_t>& all) {
  const bool told =
      std::all_of(batch.begin(), batch.end(), [](const Operation* operation) { return !operation->told_rows.empty(); });
  if (!told) return exchange_counts(region, mine, all);
  all.clear();
  for (int member = 0; member < region.size(); ++member) {
    for (const Operation* operation : batch) {
      const auto count = static_cast<std::ptrdiff_t>(operation->told_rows.size()) / region.size();
      const auto first = operation->told_rows.begin() + member * count;
      all.insert(all.end(), first, first + count);
    }
  }
  return {};
}

}  // namespace horovod::shared
