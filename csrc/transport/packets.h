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

// Into how many equal chunks of about `most` bytes these are cut: one less than it takes where that costs no packet and
// chunks are an eighth larger at most, and no larger than `limit`.
constexpr int64_t chunk_count(int64_t bytes, int64_t most, int64_t limit = INT64_MAX) {
  const auto ceiling = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const auto in_all = [&](int64_t count) { return count * ceiling(ceiling(bytes, count), kBytes); };
  const int64_t count = ceiling(bytes, most);
  const bool fewer =
      count > 1 && ceiling(bytes, count - 1) <= std::min(most + most / 8, limit) && in_all(count - 1) <= in_all(count);
  return fewer ? count - 1 : count;
}

}  // namespace horovod::packets
