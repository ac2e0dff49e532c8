// How bytes lie on a mesh connection. A connection carries frames, each a fixed header and `length` bytes of payload:
//
//   data      one part of a stripe of a transfer. Nothing in it describes its content: both sides know what is next.
//   control   u32 count, count ids, then text up to the end of the frame. On connection 0 only.
//
// A transfer is cut into stripes, one for each connection it uses, and a stripe into frames of at most kMaxFrameBytes,
// so that a control frame never waits behind more than that. Both cuts are functions of the transfer's length and
// number alone.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace horovod::wire {

inline constexpr uint32_t kMagic = 0x4d445648;  // "HVDM"
inline constexpr uint8_t kDataKind = 0;         // other kinds are ControlKind

struct FrameHeader {
  uint32_t magic = kMagic;
  uint8_t kind = kDataKind;
  uint8_t reserved = 0;
  uint16_t sender = 0;  // rank in the mesh
  uint64_t epoch = 0;
  uint64_t sequence = 0;  // data: number of the transfer between the two ranks; control: number of the control frame
  uint64_t length = 0;    // bytes that follow
};
static_assert(sizeof(FrameHeader) == 32 && std::is_trivially_copyable_v<FrameHeader>);
static_assert(std::endian::native == std::endian::little, "headers travel in the byte order of little-endian machines");

inline constexpr uint64_t kMaxFrameBytes = 1u << 20;
inline constexpr size_t kMaxControlIds = 1u << 14;
inline constexpr size_t kMaxControlText = 96u << 10;
inline constexpr size_t kMaxControlBytes = 4 + 4 * kMaxControlIds + kMaxControlText;

// A stripe below this costs more in system calls and wake-ups than a second connection gains.
inline constexpr uint64_t kMinStripeBytes = 128u << 10;

constexpr int stripe_count(uint64_t bytes, int connections) {
  return static_cast<int>(std::clamp<uint64_t>(bytes / kMinStripeBytes, 1, static_cast<uint64_t>(connections)));
}

// The connection that carries the first stripe; the next stripe goes on the next connection, in a circle. Small
// transfers stay on the first one, where control frames are read at the same time; others take turns, so that all wires
// are used even if each transfer alone is too small to be cut.
inline constexpr uint64_t kOneConnectionBytes = 16u << 10;
constexpr int first_connection(uint64_t bytes, uint64_t number, int connections) {
  return bytes <= kOneConnectionBytes ? 0 : static_cast<int>(number % static_cast<uint64_t>(connections));
}

// First byte of stripe `index` of `count`; stripe_begin(bytes, count, count) is the end. Multiples of 64, so that an
// element never lies in two stripes.
constexpr uint64_t stripe_begin(uint64_t bytes, int count, int index) {
  if (index == count) return bytes;
  return bytes / static_cast<uint64_t>(count) / 64 * 64 * static_cast<uint64_t>(index);
}

}  // namespace horovod::wire
