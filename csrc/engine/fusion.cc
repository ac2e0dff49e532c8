#include "engine/fusion.h"

#include <algorithm>

namespace horovod {
namespace {

bool has_one_dtype(const OpSpec& spec) {
  return std::all_of(spec.tensors.begin(), spec.tensors.end(),
                     [&](const TensorSpec& tensor) { return tensor.dtype == spec.tensors[0].dtype; });
}

bool can_lead(const OpSpec& spec) {
  // Which rank sums which slice of Adasum's dot products depends on the batch, and so would the result.
  return spec.type != OpType::alltoall && spec.type != OpType::barrier && spec.reduce_op != ReduceOp::adasum &&
         has_one_dtype(spec);
}

bool can_follow(const OpSpec& head, const OpSpec& next) {
  return next.type == head.type && next.reduce_op == head.reduce_op && next.device == head.device &&
         next.prescale == head.prescale && next.postscale == head.postscale && next.root == head.root &&
         next.tensors[0].dtype == head.tensors[0].dtype && has_one_dtype(next);
}

}  // namespace

size_t bytes_of(const OpSpec& spec) {
  size_t bytes = 0;
  for (const TensorSpec& tensor : spec.tensors) bytes += static_cast<size_t>(tensor.elements()) * size_of(tensor.dtype);
  return bytes;
}

size_t fused_count(size_t count, const SpecAt& spec_at, size_t most_bytes) {
  const OpSpec* const head = spec_at(0);
  if (!head || !can_lead(*head)) return 1;
  size_t bytes = bytes_of(*head), taken = 1;
  for (; taken < count; ++taken) {
    const OpSpec* const next = spec_at(taken);
    if (!next || (bytes += bytes_of(*next)) > most_bytes || !can_follow(*head, *next)) break;
  }
  return taken;
}

}  // namespace horovod
