// Memory for large results, and for what an operation works in. A fresh 256 MB block costs the kernel over 100 ms of
// page faults, four times what a collective needs to fill it; so large blocks are backed by huge pages and kept for
// reuse.
#pragma once

#include <cstddef>

namespace horovod {

// Results of at least this many bytes are worth the detour; below, malloc mostly reuses memory by itself.
inline constexpr size_t kLargeBytes = size_t{4} << 20;

// 2 MiB aligned, not cleared; null when there is no memory.
void* allocate_large(size_t bytes);
void free_large(void* memory);

}  // namespace horovod
