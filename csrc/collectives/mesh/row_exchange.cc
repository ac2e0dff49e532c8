#include "collectives/mesh/row_exchange.h"

#include <algorithm>
#include <cstring>

#include "collectives/rows.h"

namespace horovod::mesh {
namespace {

// The first message to a peer: bytes in all, rows of each tensor, and the first bytes of the data (or padding, because
// its length must be known beforehand).
constexpr size_t kHeadBytes = 1024;

uint64_t length_of(const std::vector<iovec>& pieces) {
  uint64_t bytes = 0;
  for (const iovec& piece : pieces) bytes += piece.iov_len;
  return bytes;
}

// Moves the first kHeadBytes of `pieces` to or from `head`, and leaves the others in `pieces`.
void take_head(std::vector<iovec>& pieces, std::byte* head, bool gather) {
  size_t room = kHeadBytes;
  size_t done = 0;
  for (; done < pieces.size() && room > 0; ++done) {
    iovec& piece = pieces[done];
    const size_t size = std::min(room, piece.iov_len);
    if (size > 0) gather ? std::memcpy(head, piece.iov_base, size) : std::memcpy(piece.iov_base, head, size);
    head += size;
    room -= size;
    if (size < piece.iov_len) {
      piece = {static_cast<std::byte*>(piece.iov_base) + size, piece.iov_len - size};
      break;
    }
  }
  pieces.erase(pieces.begin(), pieces.begin() + static_cast<std::ptrdiff_t>(done));
}

}  // namespace

RowExchange::RowExchange(Mesh& mesh, std::vector<int64_t> row_bytes)
    : rows_out(mesh.size()),
      pieces_out(mesh.size()),
      rows_in(mesh.size()),
      pieces_in(mesh.size()),
      mesh_(mesh),
      row_bytes_(std::move(row_bytes)),
      heads_in_(mesh.size()) {}

Status RowExchange::exchange_counts() {
  const size_t items = row_bytes_.size();
  const size_t size = sizeof(uint64_t) + sizeof(int64_t) * items + kHeadBytes;
  std::vector<std::vector<std::byte>> heads_out(mesh_.size());
  std::vector<Transfer> sends, receives;
  for (int i = 1; i < mesh_.size(); ++i) {
    const int peer = (mesh_.rank() + i) % mesh_.size();
    std::vector<std::byte>& head = heads_out[peer];
    head.resize(size);
    const uint64_t bytes = length_of(pieces_out[peer]);
    std::memcpy(head.data(), &bytes, sizeof(bytes));
    std::memcpy(head.data() + sizeof(bytes), rows_out[peer].data(), sizeof(int64_t) * items);
    take_head(pieces_out[peer], head.data() + size - kHeadBytes, true);
    heads_in_[peer].resize(size);
    sends.push_back({peer, {{head.data(), size}}});
    receives.push_back({peer, {{heads_in_[peer].data(), size}}});
  }
  HVD_TRY(mesh_.exchange(sends, receives));
  for (int peer = 0; peer < mesh_.size(); ++peer) {
    rows_in[peer].resize(items);
    if (peer == mesh_.rank()) {
      rows_in[peer] = rows_out[peer];
      continue;
    }
    uint64_t claimed = 0;
    std::memcpy(&claimed, heads_in_[peer].data(), sizeof(claimed));
    std::memcpy(rows_in[peer].data(), heads_in_[peer].data() + sizeof(claimed), sizeof(int64_t) * items);
    HVD_TRY(check_announced(peer, rows_in[peer], row_bytes_, claimed));
  }
  return {};
}

Status RowExchange::exchange_rows() {
  std::vector<Transfer> sends, receives;
  for (int i = 1; i < mesh_.size(); ++i) {
    const int peer = (mesh_.rank() + i) % mesh_.size();
    take_head(pieces_in[peer], heads_in_[peer].data() + heads_in_[peer].size() - kHeadBytes, false);
    sends.push_back({peer, std::move(pieces_out[peer])});
    receives.push_back({peer, std::move(pieces_in[peer])});
  }
  return mesh_.exchange(sends, receives);
}

}  // namespace horovod::mesh
