#include "collectives/mesh/eager.h"

#include <cstring>

#include "kernels/kernels.h"

namespace horovod::mesh {
namespace {

constexpr size_t kMostBytes = 16u << 10;          // of one operation; measured over loopback
constexpr size_t kMostReceivedBytes = 64u << 10;  // from all members together

size_t bytes_of(const OpSpec& spec) {
  size_t bytes = 0;
  for (const TensorSpec& tensor : spec.tensors) bytes += static_cast<size_t>(tensor.elements()) * size_of(tensor.dtype);
  return bytes;
}

}  // namespace

bool is_eager(const OpSpec& spec, int size) {
  if (spec.type != OpType::allreduce && spec.type != OpType::broadcast) return false;
  if (spec.device != DeviceKind::cpu || spec.tensors.empty() || spec.reduce_op == ReduceOp::adasum) return false;
  for (const TensorSpec& tensor : spec.tensors) {
    if (tensor.dtype != spec.tensors[0].dtype) return false;
  }
  const size_t bytes = bytes_of(spec);
  return bytes <= kMostBytes && bytes * static_cast<size_t>(size - 1) <= kMostReceivedBytes;
}

void pack_eager(const Operation& operation, int rank, std::string& bytes) {
  const OpSpec& spec = operation.spec;
  if (!contributes(spec, rank)) return;
  const DType dtype = spec.tensors[0].dtype;
  const bool scaled = spec.type == OpType::allreduce && spec.prescale != 1.0 && dtype != DType::boolean;
  for (const Span& span : operation.spans) {
    const size_t size = static_cast<size_t>(span.count) * size_of(dtype);
    if (size == 0) continue;
    const size_t at = bytes.size();
    bytes.append(reinterpret_cast<const char*>(span.input), size);
    if (scaled) kernels::scale(dtype, bytes.data() + at, span.input, static_cast<size_t>(span.count), spec.prescale);
  }
}

Status run_eager(Operation& operation, std::span<const std::string* const> contributions, const Hosts* hosts) {
  const OpSpec& spec = operation.spec;
  const int n = static_cast<int>(contributions.size());
  const Reduction reduction = Reduction::of(spec, n);
  for (int member = 0; member < n; ++member) {
    if (contributes(spec, member) && contributions[member]->size() != bytes_of(spec)) {
      return {Code::aborted, "Rank " + std::to_string(member) + " of the mesh sent " +
                                 std::to_string(contributions[member]->size()) + " bytes for " + spec.name +
                                 ", which has " + std::to_string(bytes_of(spec)) +
                                 ": the ranks do not run the same operation, so this epoch is over."};
    }
  }
  std::vector<const void*> inputs(contributions.size());
  size_t offset = 0;
  for (const Span& span : operation.spans) {
    const size_t size = static_cast<size_t>(span.count) * size_of(reduction.dtype);
    if (size == 0) continue;
    if (spec.type == OpType::broadcast) {
      std::memcpy(span.output, contributions[spec.root]->data() + offset, size);
    } else {
      for (int member = 0; member < n; ++member) inputs[member] = contributions[member]->data() + offset;
      reduce_members(hosts, reduction, span.output, inputs.data(), n, span.count);
    }
    offset += size;
  }
  return {};
}

}  // namespace horovod::mesh
