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

std::string pack_eager(const Operation& operation, int rank) {
  const OpSpec& spec = operation.spec;
  std::string bytes;
  if (spec.type == OpType::broadcast && spec.root != rank) return bytes;
  bytes.reserve(bytes_of(spec));
  const DType dtype = spec.tensors[0].dtype;
  const bool scaled = spec.type == OpType::allreduce && spec.prescale != 1.0 && dtype != DType::boolean;
  for (const Span& span : operation.spans) {
    const size_t size = static_cast<size_t>(span.count) * size_of(dtype);
    if (size == 0) continue;
    const size_t at = bytes.size();
    bytes.append(reinterpret_cast<const char*>(span.input), size);
    if (scaled) kernels::scale(dtype, bytes.data() + at, span.input, static_cast<size_t>(span.count), spec.prescale);
  }
  return bytes;
}

Status run_eager(Operation& operation, std::span<const std::string> contributions, const Hosts* hosts) {
  const OpSpec& spec = operation.spec;
  if (spec.type == OpType::broadcast) return take_result(operation, contributions[spec.root]);
  const int n = static_cast<int>(contributions.size());
  const Reduction reduction = Reduction::of(spec, n);
  for (int member = 0; member < n; ++member) {
    if (contributions[member].size() != bytes_of(spec)) {
      return {Code::aborted, "Rank " + std::to_string(member) + " of the mesh sent " +
                                 std::to_string(contributions[member].size()) + " bytes for " + spec.name +
                                 ", which has " + std::to_string(bytes_of(spec)) +
                                 ": the ranks do not run the same operation, so this epoch is over."};
    }
  }
  std::vector<const void*> inputs(contributions.size());
  size_t offset = 0;
  for (const Span& span : operation.spans) {
    const size_t size = static_cast<size_t>(span.count) * size_of(reduction.dtype);
    if (size == 0) continue;
    for (int member = 0; member < n; ++member) inputs[member] = contributions[member].data() + offset;
    reduce_members(hosts, reduction, span.output, inputs.data(), n, span.count);
    offset += size;
  }
  return {};
}

std::string pack_result(const Operation& operation) {
  std::string bytes;
  bytes.reserve(bytes_of(operation.spec));
  const size_t element_bytes = size_of(operation.spec.tensors[0].dtype);
  for (const Span& span : operation.spans) {
    bytes.append(reinterpret_cast<const char*>(span.output), static_cast<size_t>(span.count) * element_bytes);
  }
  return bytes;
}

Status take_result(Operation& operation, std::string_view bytes) {
  const OpSpec& spec = operation.spec;
  if (bytes.size() != bytes_of(spec)) {
    return {Code::aborted, "The result of " + spec.name + " came with " + std::to_string(bytes.size()) +
                               " bytes, but it has " + std::to_string(bytes_of(spec)) +
                               ": the ranks do not run the same operation, so this epoch is over."};
  }
  const size_t element_bytes = size_of(spec.tensors[0].dtype);
  for (const Span& span : operation.spans) {
    const size_t size = static_cast<size_t>(span.count) * element_bytes;
    if (size > 0) std::memcpy(span.output, bytes.data(), size);
    bytes.remove_prefix(size);
  }
  return {};
}

}  // namespace horovod::mesh
