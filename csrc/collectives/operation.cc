#include "collectives/operation.h"

#include <cstdlib>

#include "base/large_memory.h"

namespace horovod {

bool OutputBuffer::allocate(size_t size) {
  bytes = size;
  if (room && size <= room_bytes) {
    data = {room, [](void*) {}};
    return true;
  }
  if (size >= kLargeBytes) {
    data = {static_cast<std::byte*>(allocate_large(size)), free_large};
    return data != nullptr;
  }
  constexpr size_t kAlignment = 64;
  const size_t rounded = (size + kAlignment - 1) / kAlignment * kAlignment;
  data = {static_cast<std::byte*>(std::aligned_alloc(kAlignment, rounded ? rounded : kAlignment)), std::free};
  return data != nullptr;
}

}  // namespace horovod
