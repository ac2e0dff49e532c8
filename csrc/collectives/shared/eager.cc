#include "collectives/shared/eager.h"

#include <cstring>

#include "kernels/kernels.h"

namespace horovod::shared {

bool is_eager(const OpSpec& spec, uint32_t id) {
  if (id >= kEagerIds || (spec.type != OpType::allreduce && spec.type != OpType::broadcast)) return false;
  if (spec.reduce_op == ReduceOp::adasum) return false;
  size_t bytes = 0;
  for (const TensorSpec& tensor : spec.tensors) {
    if (tensor.dtype != spec.tensors[0].dtype) return false;
    bytes += static_cast<size_t>(tensor.elements()) * size_of(tensor.dtype);
  }
  return bytes <= kEagerBytes;
}

void store_eager(Region& region, const Operation& operation, uint32_t id, uint32_t generation) {
  const OpSpec& spec = operation.spec;
  if (spec.type == OpType::broadcast && spec.root != region.rank()) return;
  std::byte* cell = region.cell(region.rank(), id, generation);
  const DType dtype = spec.tensors[0].dtype;
  for (const Span& span : operation.spans) {
    const size_t bytes = static_cast<size_t>(span.count) * size_of(dtype);
    if (bytes == 0) continue;
    if (spec.type == OpType::allreduce && spec.prescale != 1.0) {
      kernels::scale(dtype, cell, span.input, static_cast<size_t>(span.count), spec.prescale);
    } else {
      std::memcpy(cell, span.input, bytes);
    }
    cell += bytes;
  }
}

void run_eager(Region& region, Operation& operation, uint32_t id, uint32_t generation) {
  const OpSpec& spec = operation.spec;
  const Reduction reduction = Reduction::of(spec, region.size());
  size_t offset = 0;
  std::vector<const void*> inputs(static_cast<size_t>(region.size()));
  for (const Span& span : operation.spans) {
    const size_t bytes = static_cast<size_t>(span.count) * size_of(reduction.dtype);
    if (bytes == 0) continue;
    if (spec.type == OpType::broadcast) {
      if (span.output != span.input || spec.root != region.rank()) {
        std::memcpy(span.output, region.cell(spec.root, id, generation) + offset, bytes);
      }
    } else {
      for (int member = 0; member < region.size(); ++member) {
        inputs[static_cast<size_t>(member)] = region.cell(member, id, generation) + offset;
      }
      kernels::reduce(reduction.dtype, reduction.op, span.output, inputs.data(), region.size(),
                      static_cast<size_t>(span.count), reduction.postscale);
    }
    offset += bytes;
  }
}

}  // namespace horovod::shared
