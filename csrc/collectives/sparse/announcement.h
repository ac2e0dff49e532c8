// An announcement tells, in a fixed number of words, which rows a member has for another one: how many bytes they are
// and how many rows of each tensor; and, where they are few, the rows themselves, which then need no second round.
// Members that are no partners get it through others.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <sys/uio.h>

#include "collectives/batch.h"

namespace horovod::sparse {

class AnnouncementFormat {
 public:
  // members: how many the mesh has. The announced tensors are those of the whole batch, one after the other.
  AnnouncementFormat(int members, Batch batch);

  size_t words() const { return 1 + row_bytes_.size() + room_ / sizeof(int64_t); }
  size_t bytes() const { return words() * sizeof(int64_t); }

  // pieces: the rows, in the order of the tensors.
  void write(int64_t* to, std::span<const int64_t> rows, std::span<const iovec> pieces) const;

  // Whether `member` can have written this. To be asked before any method below.
  Status check(const int64_t* announcement, int member) const;

  int64_t rows(const int64_t* announcement, size_t tensor) const { return announcement[1 + tensor]; }
  size_t bytes_of_rows(const int64_t* announcement, size_t tensor) const {
    return static_cast<size_t>(rows(announcement, tensor) * row_bytes_[tensor]);
  }
  uint64_t bytes_of_rows(const int64_t* announcement) const { return static_cast<uint64_t>(announcement[0]); }
  // Whether the announcement holds the rows, and where.
  bool has_data(const int64_t* announcement) const { return bytes_of_rows(announcement) <= room_; }
  const std::byte* data(const int64_t* announcement) const {
    return reinterpret_cast<const std::byte*>(announcement + 1 + row_bytes_.size());
  }

 private:
  std::vector<int64_t> row_bytes_;  // bytes of a row, for each tensor
  size_t room_;                     // bytes of an announcement for rows
};

}  // namespace horovod::sparse
