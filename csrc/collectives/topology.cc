#include "collectives/topology.h"

#include <cstring>

#include "collectives/adasum.h"
#include "collectives/algorithms.h"
#include "collectives/averages.h"
#include "collectives/backend.h"
#include "kernels/kernels.h"
#include "transport/mesh.h"
#include "transport/region.h"

namespace horovod {
namespace {

Status out_of_memory(const Operation& operation) {
  return {Code::internal, error_code::out_of_memory,
          "Not enough memory for the result of " + operation.spec.name + "."};
}

// In a world of one every collective is a copy, perhaps scaled.
Status run_alone(Operation& operation) {
  const OpSpec& spec = operation.spec;
  const bool reduction = traits_of(spec.type).reduces;
  if (spec.type == OpType::alltoall) {
    operation.received_splits = operation.splits;
    if (operation.splits.empty()) operation.received_splits = {static_cast<int32_t>(spec.tensors[0].rows())};
  }
  operation.outputs.resize(operation.spans.size());
  for (size_t i = 0; i < operation.spans.size(); ++i) {
    const Span& span = operation.spans[i];
    const TensorSpec& tensor = spec.tensors[i];
    int64_t count = span.count;
    std::byte* output = span.output;
    if (output == nullptr) {
      OutputBuffer& buffer = operation.outputs[i];
      buffer.shape = tensor.shape;
      if (spec.type == OpType::alltoall) {
        buffer.shape[0] = operation.received_splits[0];
        count = buffer.shape[0] * tensor.row_elements();
      }
      if (!buffer.allocate(static_cast<size_t>(count) * size_of(tensor.dtype))) return out_of_memory(operation);
      output = buffer.data.get();
    }
    const size_t bytes = static_cast<size_t>(count) * size_of(tensor.dtype);
    if (bytes == 0) continue;
    if (reduction && tensor.dtype != DType::boolean && (spec.prescale != 1.0 || spec.postscale != 1.0)) {
      kernels::scale(tensor.dtype, output, span.input, count, spec.prescale);
      kernels::scale(tensor.dtype, output, output, count, spec.postscale);
    } else if (output != span.input) {
      std::memcpy(output, span.input, bytes);
    }
  }
  return {};
}

Status run_uniform(const DataPlane& plane, Batch batch) {
  const OpType type = batch[0]->spec.type;
  if (type == OpType::allreduce && batch[0]->spec.reduce_op == ReduceOp::adasum) {
    return adasum(plane, batch);
  }
  if (averages_integers(batch[0]->spec)) [[unlikely]]
    return average_integers(plane, batch);
  if (traits_of(type).no_tensors) return {};  // the order log has told already that every member has arrived
  const Algorithms& way = algorithms_of(type);
  if (plane.region) {
    if (way.shared) return way.shared(*plane.region, batch);
  } else if (!plane.mesh->is_full()) {
    if (way.sparse) return way.sparse(*plane.hierarchy, batch);
  } else {
    if (plane.backend && plane.backend->has(type)) return plane.backend->run(batch);
    if (plane.hierarchy && way.hierarchical) return way.hierarchical(*plane.hierarchy, batch);
    if (way.mesh) return way.mesh(*plane.mesh, batch);
  }
  for (Operation* operation : batch) HVD_TRY(way.composed(plane, *operation));
  return {};
}

// A group of several dtypes runs as one part for each dtype, in the order in which dtypes first appear.
Status run_mixed(const DataPlane& plane, Operation& group) {
  group.outputs.resize(group.spans.size());
  std::vector<bool> taken(group.spans.size());
  for (size_t first = 0; first < group.spans.size(); ++first) {
    if (taken[first]) continue;
    Operation part;
    part.spec = group.spec;
    part.spec.tensors.clear();
    part.splits = group.splits;
    std::vector<size_t> places;
    for (size_t i = first; i < group.spans.size(); ++i) {
      if (taken[i] || group.spec.tensors[i].dtype != group.spec.tensors[first].dtype) continue;
      taken[i] = true;
      places.push_back(i);
      part.spec.tensors.push_back(group.spec.tensors[i]);
      part.spans.push_back(group.spans[i]);
    }
    Operation* one[] = {&part};
    HVD_TRY(run_uniform(plane, one));
    for (size_t k = 0; k < places.size() && k < part.outputs.size(); ++k) {
      group.outputs[places[k]] = std::move(part.outputs[k]);
    }
    group.received_splits = std::move(part.received_splits);
  }
  return {};
}

}  // namespace

Status run_batch(const DataPlane& plane, Batch batch) {
  if (batch[0]->on_device) [[unlikely]]
    return plane.device->run(batch);
  if (!plane.region && !plane.mesh) {
    for (Operation* operation : batch) HVD_TRY(run_alone(*operation));
    return {};
  }
  if (batch.size() == 1 && !batch[0]->spec.uniform_dtype()) return run_mixed(plane, *batch[0]);
  return run_uniform(plane, batch);
}

int rank_in(const DataPlane& plane) { return plane.region ? plane.region->rank() : plane.mesh->rank(); }
int size_of(const DataPlane& plane) { return plane.region ? plane.region->size() : plane.mesh->size(); }

Status gather_bytes(const DataPlane& plane, const void* mine, size_t bytes, std::vector<std::byte>& all) {
  Operation gather;
  gather.spec.type = OpType::allgather;
  gather.spec.name = "what the members tell each other";
  gather.spec.tensors = {{DType::uint8, {static_cast<int64_t>(bytes)}}};
  gather.spans = {{static_cast<const std::byte*>(mine), nullptr, static_cast<int64_t>(bytes)}};
  Operation* one[] = {&gather};
  HVD_TRY(run_batch(plane, one));
  const std::byte* data = gather.outputs[0].data.get();
  all.assign(data, data + gather.outputs[0].bytes);
  return {};
}

}  // namespace horovod
