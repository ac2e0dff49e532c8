// What cutting a batch into chunks takes: where its pieces lie, how wide a chunk may be, and the operation of the CPU's
// data plane that each chunk is.
#pragma once

#include <algorithm>
#include <utility>

#include "backends/staging/collectives.h"

namespace horovod::staging {

// The pieces of elements [begin, end) of a virtual array on the device, from `offset` of the buffer on.
void inputs_of(const SpanList& list, int64_t begin, int64_t end, size_t offset, std::vector<Piece>& pieces);
void outputs_of(const SpanList& list, int64_t begin, int64_t end, size_t offset, std::vector<Piece>& pieces);

// Makes the operation of one chunk: an operation `like` that, on one tensor, for the CPU's data plane.
void put_on_host(Operation& operation, const OpSpec& like, DType dtype, std::vector<int64_t> shape);
Status run_on_host(const Run& run, Operation& operation);
// Runs such an operation with the result in `room`, which must be of `bytes`.
Status run_into(const Run& run, Operation& operation, std::byte* room, size_t bytes);

// Bytes of one window when `windows` of them share a buffer.
int64_t window_bytes(const Run& run, int windows, int64_t item = 1);

// How many elements of `total` the window that begins at `begin` has.
inline int64_t part_of(int64_t total, int64_t begin, int64_t window) {
  return std::clamp<int64_t>(total - begin, 0, window);
}

template <typename Visit>
Status for_each_tensor(Batch batch, Visit&& visit) {
  for (Operation* operation : batch) {
    for (size_t t = 0; t < operation->spec.tensors.size(); ++t) HVD_TRY(visit(*operation, t));
  }
  return {};
}

// visit(dtype) for each dtype of the batch, in the order in which they first appear.
template <typename Visit>
Status for_each_dtype(Batch batch, Visit&& visit) {
  bool seen[kDTypeCount] = {};
  return for_each_tensor(batch, [&](Operation& operation, size_t t) -> Status {
    const DType dtype = operation.spec.tensors[t].dtype;
    if (std::exchange(seen[static_cast<int>(dtype)], true)) return {};
    return visit(dtype);
  });
}

}  // namespace horovod::staging
