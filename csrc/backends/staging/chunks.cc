#include "backends/staging/chunks.h"

#include <cstring>

#include "collectives/topology.h"

namespace horovod::staging {
namespace {

constexpr int64_t kLine = 64;  // windows begin on cache lines

cuda::Address address_of(const std::byte* memory) { return reinterpret_cast<cuda::Address>(memory); }

}  // namespace

void inputs_of(const SpanList& list, int64_t begin, int64_t end, size_t offset, std::vector<Piece>& pieces) {
  const size_t item = list.element_bytes();
  list.visit(begin, end, [&](const std::byte* input, std::byte*, int64_t count, int64_t at) {
    pieces.push_back({address_of(input), offset + static_cast<size_t>(at) * item, static_cast<size_t>(count) * item});
  });
}
void outputs_of(const SpanList& list, int64_t begin, int64_t end, size_t offset, std::vector<Piece>& pieces) {
  const size_t item = list.element_bytes();
  list.visit(begin, end, [&](const std::byte*, std::byte* output, int64_t count, int64_t at) {
    pieces.push_back({address_of(output), offset + static_cast<size_t>(at) * item, static_cast<size_t>(count) * item});
  });
}

void put_on_host(Operation& operation, const OpSpec& like, DType dtype, std::vector<int64_t> shape) {
  OpSpec& spec = operation.spec;
  spec.type = like.type;
  spec.name = like.name;
  spec.tensors = {{dtype, std::move(shape)}};
  spec.reduce_op = like.reduce_op;
  spec.prescale = like.prescale;
  spec.postscale = like.postscale;
  spec.root = like.root;
}

Status run_on_host(const Run& run, Operation& operation) {
  Operation* one[] = {&operation};
  return run_batch(run.plane, one);
}

Status run_into(const Run& run, Operation& operation, std::byte* room, size_t bytes) {
  operation.outputs.resize(1);
  operation.outputs[0].room = room;
  operation.outputs[0].room_bytes = bytes;
  HVD_TRY(run_on_host(run, operation));
  if (operation.outputs[0].bytes == bytes && operation.outputs[0].data.get() == room) return {};
  return {Code::aborted, error_code::unexpected_data,
          "A part of " + operation.spec.name + " has " + std::to_string(operation.outputs[0].bytes) + " bytes where " +
              std::to_string(bytes) + " were expected: the ranks do not run the same operation, so this world ends."};
}

int64_t window_bytes(const Run& run, int windows, int64_t item) {
  const auto bytes = static_cast<int64_t>(run.pipeline.buffer_bytes()) / windows;
  return std::max(item, bytes >= kLine ? bytes / kLine * kLine / item * item : bytes / item * item);
}

}  // namespace horovod::staging
