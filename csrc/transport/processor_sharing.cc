#include "transport/processor_sharing.h"

#include <algorithm>
#include <thread>

#include <sched.h>

namespace horovod {
namespace {

constexpr int kMemberShift = 48;

int usable_processors() {
  cpu_set_t set;  // too small where the kernel knows of more than 1024 processors
  return sched_getaffinity(0, sizeof set, &set) == 0
             ? CPU_COUNT(&set)
             : std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

}  // namespace

ProcessorSharing::ProcessorSharing(int rank, std::vector<std::byte*> areas, size_t bytes, std::vector<WaitHint*> hints)
    : rank_(rank),
      areas_(std::move(areas)),
      bytes_(bytes),
      hints_(std::move(hints)),
      crowded_(size() > usable_processors()) {}

void ProcessorSharing::begin(const Awaited* awaited) {
  stay_at(sched_getcpu());
  if (!awaited) return;
  const auto offset = reinterpret_cast<const std::byte*>(awaited->word) - areas_[awaited->member];
  WaitHint& mine = *hints_[rank_];
  mine.value.store(awaited->value, std::memory_order_relaxed);
  mine.word.store(1 + (static_cast<uint64_t>(awaited->member) << kMemberShift | static_cast<uint64_t>(offset)),
                  std::memory_order_relaxed);
}

bool ProcessorSharing::somebody_could_run() const {
  const uint32_t here = hints_[rank_]->processor.load(std::memory_order_relaxed);
  for (int member = 0; member < size(); ++member) {
    if (member == rank_ || hints_[member]->processor.load(std::memory_order_relaxed) != here) continue;
    if (could_run(member)) return true;
  }
  return false;
}

bool ProcessorSharing::could_run(int member) const {
  const uint64_t word = hints_[member]->word.load(std::memory_order_relaxed) - 1;  // wraps around where there is none
  const uint64_t of = word >> kMemberShift;
  const uint64_t offset = word & ((uint64_t{1} << kMemberShift) - 1);
  // Another process wrote the hint: it is used only if it names a word of an area.
  if (of >= hints_.size() || offset % sizeof(uint64_t) != 0 || offset > bytes_ - sizeof(uint64_t)) return true;
  const auto* reached = reinterpret_cast<const std::atomic<uint64_t>*>(areas_[of] + offset);
  return reached->load(std::memory_order_relaxed) >= hints_[member]->value.load(std::memory_order_relaxed);
}

// The others read it all the time. It is written only when it changes, so that it stays in their caches.
void ProcessorSharing::stay_at(int processor) {
  std::atomic<uint32_t>& told = hints_[rank_]->processor;
  const auto news = static_cast<uint32_t>(processor + 1);
  if (told.load(std::memory_order_relaxed) != news) told.store(news, std::memory_order_relaxed);
}

}  // namespace horovod
