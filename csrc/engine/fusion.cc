#include "engine/fusion.h"

namespace horovod {
namespace {

bool can_lead(const OpSpec& spec) {
  // Adasum is not fused: which rank sums which slice of its dot products depends on the batch, and so would the result.
  return traits_of(spec.type).fuses && spec.reduce_op != ReduceOp::adasum && spec.uniform_dtype();
}

bool can_follow(const OpSpec& head, const OpSpec& next) {
  return next.type == head.type && next.reduce_op == head.reduce_op && next.device == head.device &&
         next.prescale == head.prescale && next.postscale == head.postscale && next.root == head.root &&
         next.tensors[0].dtype == head.tensors[0].dtype && next.uniform_dtype();
}

}  // namespace

size_t fused_count(size_t count, const SpecAt& spec_at, size_t most_bytes) {
  const OpSpec* const head = spec_at(0);
  if (!head || !can_lead(*head)) return 1;
  size_t bytes = head->bytes(), taken = 1;
  for (; taken < count; ++taken) {
    const OpSpec* const next = spec_at(taken);
    if (!next || (bytes += next->bytes()) > most_bytes || !can_follow(*head, *next)) break;
  }
  return taken;
}

}  // namespace horovod
