#include "collectives/mesh/eager.h"

#include <algorithm>
#include <cstring>

#include "collectives/averages.h"
#include "collectives/sparse/balanced.h"
#include "kernels/kernels.h"

namespace horovod::mesh {
namespace {

constexpr size_t kMostBytes = 16u << 10;          // bytes of one operation; measured over loopback
constexpr size_t kMostReceivedBytes = 64u << 10;  // bytes that a member receives from all others together

Status check_bytes(const OpSpec& spec, const std::string& sender, const std::string& contribution) {
  if (contribution.size() == spec.bytes()) return {};
  return {Code::aborted, error_code::unexpected_data,
          sender + " of the mesh sent " + std::to_string(contribution.size()) + " bytes for " + spec.name +
              ", which has " + std::to_string(spec.bytes()) +
              ": the ranks do not run the same operation, so this world ends."};
}

}  // namespace

bool is_eager(const OpSpec& spec, int size) {
  if (spec.type != OpType::allreduce && spec.type != OpType::broadcast) return false;
  if (spec.device != DeviceKind::cpu || spec.tensors.empty() || spec.reduce_op == ReduceOp::adasum) return false;
  if (averages_integers(spec)) return false;
  if (!spec.uniform_dtype()) return false;
  const size_t bytes = spec.bytes();
  return bytes <= kMostBytes && bytes * static_cast<size_t>(size - 1) <= kMostReceivedBytes;
}

size_t eager_bytes(const Operation& operation, int rank) {
  return operation.spec.type == OpType::broadcast && operation.spec.root != rank ? 0 : operation.spec.bytes();
}

void pack_eager(const Operation& operation, int rank, std::byte* bytes) {
  const OpSpec& spec = operation.spec;
  if (eager_bytes(operation, rank) == 0) return;
  const DType dtype = spec.tensors[0].dtype;
  const bool scaled = spec.type == OpType::allreduce && spec.prescale != 1.0 && dtype != DType::boolean;
  for (const Span& span : operation.spans) {
    const size_t size = static_cast<size_t>(span.count) * size_of(dtype);
    if (size == 0) continue;
    if (scaled) {
      kernels::scale(dtype, bytes, span.input, static_cast<size_t>(span.count), spec.prescale);
    } else {
      std::memcpy(bytes, span.input, size);
    }
    bytes += size;
  }
}

std::string pack_eager(const Operation& operation, int rank) {
  std::string bytes(eager_bytes(operation, rank), '\0');
  pack_eager(operation, rank, reinterpret_cast<std::byte*>(bytes.data()));
  return bytes;
}

Status combine_host(const Operation& operation, const Hosts& hosts, int host,
                    std::span<const std::string> contributions, std::string& combined) {
  const OpSpec& spec = operation.spec;
  const std::vector<int>& members = hosts.members(host);
  combined.clear();
  if (spec.type == OpType::broadcast) {
    const auto root = std::find(members.begin(), members.end(), spec.root);
    if (root == members.end()) return {};
    combined = contributions[static_cast<size_t>(root - members.begin())];
    return check_bytes(spec, "Rank " + std::to_string(spec.root), combined);
  }
  std::vector<const void*> inputs;
  for (size_t place = 0; place < members.size(); ++place) {
    HVD_TRY(check_bytes(spec, "Rank " + std::to_string(members[place]), contributions[place]));
    inputs.push_back(contributions[place].data());
  }
  combined.resize(spec.bytes());
  const DType dtype = spec.tensors[0].dtype;
  kernels::reduce(dtype, Reduction::of(spec, hosts.size()).op, combined.data(), inputs.data(),
                  static_cast<int>(inputs.size()), combined.size() / size_of(dtype), 1.0);
  return {};
}

Status run_eager(Operation& operation, std::span<const std::string> contributions, const Hosts* hosts, Order order) {
  const OpSpec& spec = operation.spec;
  if (spec.type == OpType::broadcast) {
    return take_result(operation, contributions[hosts ? hosts->host(spec.root) : spec.root]);
  }
  const int n = static_cast<int>(contributions.size());
  const Reduction reduction = Reduction::of(spec, hosts ? hosts->size() : n);
  for (int from = 0; from < n; ++from) {
    HVD_TRY(check_bytes(spec, (hosts ? "Host " : "Rank ") + std::to_string(from), contributions[from]));
  }
  std::vector<const void*> inputs(contributions.size());
  size_t offset = 0;
  for (const Span& span : operation.spans) {
    const size_t size = static_cast<size_t>(span.count) * size_of(reduction.dtype);
    if (size == 0) continue;
    for (int from = 0; from < n; ++from) inputs[from] = contributions[from].data() + offset;
    if (order == Order::balanced) {
      sparse::reduce_balanced(reduction, span.output, inputs.data(), n, span.count);
    } else {
      kernels::reduce(reduction.dtype, reduction.op, span.output, inputs.data(), n, static_cast<size_t>(span.count),
                      reduction.postscale);
    }
    offset += size;
  }
  return {};
}

size_t result_bytes(const Operation& operation) { return operation.spec.bytes(); }

void pack_result(const Operation& operation, std::byte* bytes) {
  if (operation.spec.tensors.empty()) return;
  const size_t element_bytes = size_of(operation.spec.tensors[0].dtype);
  for (const Span& span : operation.spans) {
    const size_t size = static_cast<size_t>(span.count) * element_bytes;
    if (size > 0) std::memcpy(bytes, span.output, size);
    bytes += size;
  }
}

std::string pack_result(const Operation& operation) {
  std::string bytes(result_bytes(operation), '\0');
  pack_result(operation, reinterpret_cast<std::byte*>(bytes.data()));
  return bytes;
}

Status take_result(Operation& operation, std::string_view bytes) {
  const OpSpec& spec = operation.spec;
  if (bytes.size() != spec.bytes()) {
    return {Code::aborted, error_code::unexpected_data,
            "The result of " + spec.name + " came with " + std::to_string(bytes.size()) + " bytes, but it has " +
                std::to_string(spec.bytes()) + ": the ranks do not run the same operation, so this world ends."};
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
