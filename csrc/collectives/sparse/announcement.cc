#include "collectives/sparse/announcement.h"

#include <algorithm>
#include <cstring>

#include "collectives/rows.h"

namespace horovod::sparse {
namespace {

// How many bytes of rows an announcement has room for, and how many all announcements that pass one member have
// together. The room is sent even where it is empty, so it is bounded.
constexpr size_t kMostRoom = 1024;
constexpr size_t kMostRoomOfAll = 32 << 10;

}  // namespace

AnnouncementFormat::AnnouncementFormat(int members, Batch batch)
    : room_(std::min(kMostRoom, kMostRoomOfAll / static_cast<size_t>(members)) / sizeof(int64_t) * sizeof(int64_t)) {
  for (const Operation* operation : batch) {
    for (const TensorSpec& tensor : operation->spec.tensors) row_bytes_.push_back(tensor.row_bytes());
  }
}

void AnnouncementFormat::write(int64_t* to, std::span<const int64_t> rows, std::span<const iovec> pieces) const {
  size_t bytes = 0;
  for (const iovec& piece : pieces) bytes += piece.iov_len;
  to[0] = static_cast<int64_t>(bytes);
  std::copy(rows.begin(), rows.end(), to + 1);
  if (bytes > room_) return;
  auto* at = reinterpret_cast<std::byte*>(to + 1 + rows.size());
  for (const iovec& piece : pieces) {
    if (piece.iov_len > 0) std::memcpy(at, piece.iov_base, piece.iov_len);
    at += piece.iov_len;
  }
}

Status AnnouncementFormat::check(const int64_t* announcement, int member) const {
  return check_announced(member, {announcement + 1, row_bytes_.size()}, row_bytes_, bytes_of_rows(announcement));
}

}  // namespace horovod::sparse
