#include "base/large_memory.h"

#include <pthread.h>
#include <sys/mman.h>

#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace horovod {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kMostKeptBytes = size_t{512} << 20;

struct Block {
  void* memory;
  size_t bytes;
};

// One pool for the process, because results outlive the engine that made them. Never destroyed: a result may be freed
// at exit.
struct Pool {
  std::mutex mutex;                            // guards everything below
  std::unordered_map<void*, size_t> bytes_of;  // every block that is alive, in use or kept
  std::vector<Block> kept;                     // free blocks, oldest first
  size_t kept_bytes = 0;
};

Pool& pool() {
  static Pool* const instance = [] {
    // No thread holds the lock at the moment of a fork, so a child may free what it inherited.
    pthread_atfork([] { pool().mutex.lock(); }, [] { pool().mutex.unlock(); }, [] { pool().mutex.unlock(); });
    return new Pool();
  }();
  return *instance;
}

void* map_huge(size_t bytes) {
  // Over-allocate to align, then give the ends back.
  const size_t total = bytes + kHugePage;
  void* memory = mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  const auto begin = reinterpret_cast<uintptr_t>(memory);
  const uintptr_t aligned = (begin + kHugePage - 1) / kHugePage * kHugePage;
  if (aligned > begin) munmap(memory, aligned - begin);
  if (aligned + bytes < begin + total)
    munmap(reinterpret_cast<void*>(aligned + bytes), begin + total - aligned - bytes);
  madvise(reinterpret_cast<void*>(aligned), bytes, MADV_HUGEPAGE);  // advice only: without it pages are small
  return reinterpret_cast<void*>(aligned);
}

}  // namespace

void* allocate_large(size_t bytes) {
  const size_t rounded = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  Pool& shared = pool();
  {
    const std::lock_guard<std::mutex> lock(shared.mutex);
    // The youngest block that fits and wastes less than a quarter: it may still be in the caches.
    for (size_t i = shared.kept.size(); i-- > 0;) {
      const Block block = shared.kept[i];
      if (block.bytes < rounded || block.bytes - rounded > block.bytes / 4) continue;
      shared.kept.erase(shared.kept.begin() + static_cast<std::ptrdiff_t>(i));
      shared.kept_bytes -= block.bytes;
      return block.memory;
    }
  }
  void* memory = map_huge(rounded);
  if (!memory) return nullptr;
  const std::lock_guard<std::mutex> lock(shared.mutex);
  shared.bytes_of[memory] = rounded;
  return memory;
}

void free_large(void* memory) {
  if (!memory) return;
  Pool& shared = pool();
  std::vector<Block> surplus;
  {
    const std::lock_guard<std::mutex> lock(shared.mutex);
    const size_t bytes = shared.bytes_of.at(memory);
    shared.kept.push_back({memory, bytes});
    shared.kept_bytes += bytes;
    while (shared.kept_bytes > kMostKeptBytes) {
      surplus.push_back(shared.kept.front());
      shared.kept_bytes -= shared.kept.front().bytes;
      shared.bytes_of.erase(shared.kept.front().memory);
      shared.kept.erase(shared.kept.begin());
    }
  }
  for (const Block& block : surplus) munmap(block.memory, block.bytes);
}

}  // namespace horovod
