// How many bytes should go over a mesh at a time, where the caller may choose.
//
// TCP hands an interface packets of up to 64 KB with their headers, into which 45 of Ethernet's segments of 1448 bytes
// fit. A chunk with a few bytes more takes another packet, which costs as much as a full one. All members must cut
// alike, so these functions depend on their arguments only.
#pragma once

#include <algorithm>
#include <cstdint>

namespace horovod::packets {

inline constexpr int64_t kBytes = 63 << 10;  // leaves room for a frame's header

// `bytes`, or a little less where that saves a packet.
constexpr int64_t whole(int64_t bytes) { return bytes < kBytes ? bytes : bytes / kBytes * kBytes; }

// Into how many chunks of `most` bytes `bytes` are cut. The last chunk has what the others leave: less than `most`, or
// up to a quarter more, but at most `limit`. Equal chunks would take more packets, and a chunk for a small rest another
// system call.
constexpr int64_t chunk_count(int64_t bytes, int64_t most, int64_t limit = INT64_MAX) {
  const int64_t more = std::min(most / 4, limit - most);
  return std::max<int64_t>((bytes - more + most - 1) / most, 1);
}

}  // namespace horovod::packets
