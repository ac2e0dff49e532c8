// The part of the driver's stand-in with memory, which is this process's own, and with copies between a device and
// page-locked memory.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <utility>

#include "backends/cuda/driver.h"
#include "cuda_world.h"

using namespace standin;

namespace {

// With the world's mutex held.
int allocate(uintptr_t* address, size_t bytes, const std::shared_ptr<Pool>& pool, void* stream) {
  if (const int refused = allow_unsafe_call(); refused) return refused;
  const std::shared_ptr<Queue> queue = stream_of(stream);
  if (!queue || (pool && pool->device != queue->device)) return kInvalidHandle;
  if (bytes == 0) return kInvalidValue;
  if (world().used_bytes + bytes > kDeviceBytes) return kOutOfMemory;
  void* memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  if (!memory) return kOutOfMemory;
  std::memset(memory, 0xa5, bytes);  // what was there before
  *address = reinterpret_cast<uintptr_t>(memory);
  world().blocks[*address] = {bytes, queue->device, pool};
  world().used_bytes += bytes;
  if (pool) pool->reserved = std::max(pool->reserved, pool->used += bytes);
  return kSuccess;
}

}  // namespace

void standin::release_idle_memory() {
  for (const auto& [handle, pool] : world().pools) {
    pool->reserved = std::max<size_t>(pool->used, std::min<size_t>(pool->reserved, pool->threshold));
  }
}

EXPORTED int cuMemAllocAsync(uintptr_t* address, size_t bytes, void* stream) {
  ENTER("cuMemAllocAsync");
  return allocate(address, bytes, nullptr, stream);
}

EXPORTED int cuMemAllocFromPoolAsync(uintptr_t* address, size_t bytes, void* handle, void* stream) {
  ENTER("cuMemAllocFromPoolAsync");
  const auto pool = world().pools.find(handle);
  if (pool == world().pools.end() || pool->second->destroyed) return kInvalidValue;
  return allocate(address, bytes, pool->second, stream);
}

EXPORTED int cuMemPoolCreate(void** handle, const horovod::cuda::PoolProperties* properties) {
  ENTER("cuMemPoolCreate");
  const bool plain = properties->allocation == 1 && properties->handles == 0 && properties->location == 1;
  const auto is_zero = [](unsigned char byte) { return byte == 0; };
  if (!plain || !std::all_of(std::begin(properties->rest), std::end(properties->rest), is_zero)) return kInvalidValue;
  if (properties->ordinal < 0 || properties->ordinal >= static_cast<int>(world().devices.size())) return kInvalidDevice;
  const auto made = std::make_shared<Pool>();
  made->device = properties->ordinal;
  world().pools.emplace(made.get(), made);
  *handle = made.get();
  return kSuccess;
}

EXPORTED int cuMemPoolSetAttribute(void* handle, int attribute, void* value) {
  ENTER("cuMemPoolSetAttribute");
  const auto pool = world().pools.find(handle);
  if (pool == world().pools.end() || attribute != horovod::cuda::kReleaseThreshold) return kInvalidValue;
  std::memcpy(&pool->second->threshold, value, sizeof pool->second->threshold);
  return kSuccess;
}

EXPORTED int cuMemPoolDestroy(void* handle) {
  ENTER("cuMemPoolDestroy");
  const auto pool = world().pools.find(handle);
  if (pool == world().pools.end() || std::exchange(pool->second->destroyed, true)) return kInvalidValue;
  if (pool->second->used == 0) world().pools.erase(pool);
  return kSuccess;
}

EXPORTED int cuMemFreeAsync(uintptr_t address, void* stream) {
  ENTER("cuMemFreeAsync");
  const auto found = world().blocks.find(address);
  const std::shared_ptr<Queue> queue = stream_of(stream);
  if (found == world().blocks.end()) return kInvalidValue;
  if (!queue) return kInvalidHandle;
  if (queue->capture.state != Capture::none) return kInvalidValue;  // the graph has not allocated it
  queue->push([address] {
    const std::lock_guard<std::mutex> freeing(world().mutex);
    const auto block = world().blocks.find(address);
    if (block == world().blocks.end()) std::abort();  // freed twice
    std::memset(reinterpret_cast<void*>(address), 0xee, block->second.bytes);
    world().used_bytes -= block->second.bytes;
    if (const std::shared_ptr<Pool> pool = block->second.pool) {
      pool->used -= block->second.bytes;
      if (pool->destroyed && pool->used == 0) world().pools.erase(pool.get());
    }
    world().blocks.erase(block);
    std::free(reinterpret_cast<void*>(address));
  });
  return kSuccess;
}

EXPORTED int cuMemsetD8Async(uintptr_t address, unsigned char value, size_t bytes, void* stream) {
  ENTER("cuMemsetD8Async");
  const std::shared_ptr<Queue> queue = stream_of(stream);
  if (!queue) return kInvalidHandle;
  queue->push([=] { std::memset(reinterpret_cast<void*>(address), value, bytes); });
  return kSuccess;
}

EXPORTED int cuMemcpyAsync(uintptr_t to, uintptr_t from, size_t bytes, void* stream) {
  ENTER("cuMemcpyAsync");
  const std::shared_ptr<Queue> queue = stream_of(stream);
  if (!queue) return kInvalidHandle;
  queue->push([=] { std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes); });
  return kSuccess;
}

EXPORTED int cuMemHostAlloc(void** memory, size_t bytes, unsigned flags) {
  ENTER("cuMemHostAlloc");
  if (const int refused = allow_unsafe_call(); refused) return refused;
  if (!current()) return kInvalidContext;
  if (bytes == 0 || flags != 1) return kInvalidValue;
  *memory = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  if (!*memory) return kOutOfMemory;
  std::memset(*memory, 0x5a, bytes);
  world().pinned[reinterpret_cast<uintptr_t>(*memory)] = bytes;
  if (world().pinned.size() > world().most_pinned) world().most_pinned = world().pinned.size();
  return kSuccess;
}

EXPORTED int cuMemFreeHost(void* memory) {
  ENTER("cuMemFreeHost");
  if (const int refused = allow_unsafe_call(); refused) return refused;
  const auto found = world().pinned.find(reinterpret_cast<uintptr_t>(memory));
  if (found == world().pinned.end()) return kInvalidValue;
  std::memset(memory, 0xee, found->second);
  std::free(memory);
  world().pinned.erase(found);
  return kSuccess;
}

namespace {

// With the world's mutex held: a copy whose memory is what it should be.
int queue_copy(uintptr_t device, uintptr_t host, size_t bytes, void* stream, bool to_host) {
  const std::shared_ptr<Queue> queue = stream_of(stream);
  if (!queue) return kInvalidHandle;
  auto block = world().blocks.upper_bound(device);
  auto pinned = world().pinned.upper_bound(host);
  if (block == world().blocks.begin() || pinned == world().pinned.begin()) return kInvalidValue;
  --block;
  --pinned;
  if (device + bytes > block->first + block->second.bytes || block->second.device != queue->device) {
    return kInvalidValue;
  }
  if (host + bytes > pinned->first + pinned->second) return kInvalidValue;
  if (world().recording) {
    world().copies.push_back({queue->device, to_host, static_cast<int64_t>(device), static_cast<int64_t>(bytes)});
  }
  queue->push([=] {
    std::memcpy(reinterpret_cast<void*>(to_host ? host : device), reinterpret_cast<void*>(to_host ? device : host),
                bytes);
  });
  return kSuccess;
}

}  // namespace

EXPORTED int cuMemcpyDtoHAsync_v2(void* to, uintptr_t from, size_t bytes, void* stream) {
  ENTER("cuMemcpyDtoHAsync_v2");
  return queue_copy(from, reinterpret_cast<uintptr_t>(to), bytes, stream, true);
}

EXPORTED int cuMemcpyHtoDAsync_v2(uintptr_t to, const void* from, size_t bytes, void* stream) {
  ENTER("cuMemcpyHtoDAsync_v2");
  return queue_copy(to, reinterpret_cast<uintptr_t>(from), bytes, stream, false);
}

// -- for tests and for the stand-in of NCCL ---------------------------------------------------------------------------

// Begins to record copies between devices and pinned memory, from none.
EXPORTED void standin_cuda_record() {
  const std::lock_guard<std::mutex> lock(world().mutex);
  world().copies.clear();
  world().recording = true;
}

// What was recorded since, four numbers each (see Copy), up to `most` of them; gives how many there are.
EXPORTED int64_t standin_cuda_recorded(int64_t* numbers, int64_t most) {
  const std::lock_guard<std::mutex> lock(world().mutex);
  world().recording = false;
  const auto count = static_cast<int64_t>(world().copies.size());
  if (count > 0) std::memcpy(numbers, world().copies.data(), sizeof(Copy) * std::min(most, count));
  return count;
}

// Whether [address, address + bytes) is memory of the device.
EXPORTED int standin_cuda_holds(const void* address, size_t bytes, int device) {
  const std::lock_guard<std::mutex> lock(world().mutex);
  const auto begin = reinterpret_cast<uintptr_t>(address);
  auto found = world().blocks.upper_bound(begin);
  if (found == world().blocks.begin()) return 0;
  --found;
  return found->second.device == device && begin + bytes <= found->first + found->second.bytes;
}
