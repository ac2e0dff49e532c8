// How large what goes over a mesh at a time should be, where somebody may choose.
//
// TCP hands an interface packets of up to 64 KB with their headers; of Ethernet's segments of 1448 bytes 45 fit in. A
// chunk with a few bytes more takes another packet, which costs as much as a full one. All members must cut alike, so
// these are functions of nothing but their arguments.
#pragma once

#include <algorithm>
#include <cstdint>

namespace horovod::packets {

inline constexpr int64_t kBytes = 63 << 10;  // leaves room for a frame's header

// So many bytes, or a little less where that saves a packet.
constexpr int64_t whole(int64_t bytes) { return bytes < kBytes ? bytes : bytes / kBytes * kBytes; }

// Into how many chunks of `most` bytes these are cut. The last one has what the others leave: less, or up to a quarter
// more, but no more than `limit` in all. Equal chunks would take more packets, and the rest alone more system calls.
constexpr int64_t chunk_count(int64_t bytes, int64_t most, int64_t limit = INT64_MAX) {
  const int64_t more = std::min(most / 4, limit - most);
  return std::max<int64_t>((bytes - more + most - 1) / most, 1);
}

}  // namespace horovod::packets
