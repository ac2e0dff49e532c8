#include "collectives/shared/eager.h"

#include <cstring>

#include "collectives/averages.h"
#include "collectives/rows.h"
#include "collectives/shared/gather.h"
#include "kernels/kernels.h"

namespace horovod::shared {
namespace {

// The beginning of the cell of an allgather or alltoall: `counts` row counts follow, then the rows themselves if they
// fit.
struct RowsHeader {
  uint64_t fits;
  int64_t counts[];

  const std::byte* rows(size_t count) const { return reinterpret_cast<const std::byte*>(counts + count); }
};

constexpr size_t kMaxCounts = 64;  // leaves three quarters of a cell for rows

// How many row counts a member puts into its cell: one for each tensor, or for each receiver.
size_t counts_of(const OpSpec& spec, int size) {
  return spec.type == OpType::alltoall ? static_cast<size_t>(size) : spec.tensors.size();
}

bool tells_rows(const OpSpec& spec) { return spec.type == OpType::allgather || spec.type == OpType::alltoall; }

RowsHeader& header(const Region& region, int member, uint32_t id, uint32_t generation) {
  return *reinterpret_cast<RowsHeader*>(region.cell(member, id, generation));
}

void store_rows(RowsHeader& cell, const Operation& operation, int size) {
  const OpSpec& spec = operation.spec;
  const size_t count = counts_of(spec, size);
  for (size_t i = 0; i < count; ++i) {
    cell.counts[i] =
        spec.type == OpType::allgather ? spec.tensors[i].rows() : rows_to(operation, 0, static_cast<int>(i), size);
  }
  cell.fits = sizeof(RowsHeader) + count * sizeof(int64_t) + spec.bytes() <= kEagerBytes;
  if (cell.fits == 0) return;
  auto* place = const_cast<std::byte*>(cell.rows(count));
  for (size_t i = 0; i < operation.spans.size(); ++i) {
    const size_t bytes = static_cast<size_t>(operation.spans[i].count) * size_of(spec.tensors[i].dtype);
    if (bytes > 0) std::memcpy(place, operation.spans[i].input, bytes);
    place += bytes;
  }
}

Status run_allgather(Region& region, Operation& operation, const std::vector<const RowsHeader*>& cells) {
  const size_t tensors = operation.spec.tensors.size();
  operation.outputs.resize(tensors);
  std::vector<const std::byte*> sources;
  for (const RowsHeader* cell : cells) sources.push_back(cell->rows(tensors));
  for (size_t i = 0; i < tensors; ++i) {
    int64_t total = 0;
    for (int member = 0; member < region.size(); ++member) {
      HVD_TRY(add_rows(operation, region.label(member), cells[static_cast<size_t>(member)]->counts[i], total));
    }
    HVD_TRY(make_rows(operation, i, total));
    std::byte* place = operation.outputs[i].data.get();
    const int64_t row = operation.spec.tensors[i].row_bytes();
    for (size_t member = 0; member < cells.size(); ++member) {
      const auto bytes = static_cast<size_t>(cells[member]->counts[i] * row);
      if (bytes > 0) std::memcpy(place, sources[member], bytes);
      place += bytes;
      sources[member] += bytes;
    }
  }
  return {};
}

Status run_alltoall(Region& region, Operation& operation, const std::vector<const RowsHeader*>& cells) {
  const auto rank = static_cast<size_t>(region.rank());
  int64_t total = 0;
  for (int member = 0; member < region.size(); ++member) {
    const int64_t count = cells[static_cast<size_t>(member)]->counts[rank];
    HVD_TRY(add_split(operation, 0, member, region.size(), region.label(member), count, total));
  }
  operation.outputs.resize(1);
  HVD_TRY(make_rows(operation, 0, total));
  std::byte* place = operation.outputs[0].data.get();
  const int64_t row = operation.spec.tensors[0].row_bytes();
  for (const RowsHeader* cell : cells) {
    int64_t before = 0;
    for (size_t to = 0; to < rank; ++to) before += cell->counts[to];
    const auto bytes = static_cast<size_t>(cell->counts[rank] * row);
    if (bytes > 0) std::memcpy(place, cell->rows(cells.size()) + before * row, bytes);
    place += bytes;
  }
  return {};
}

// This member's rows of every tensor, or with an allreduce all of them, reduced over all members' cells.
Status run_reduction(Region& region, Operation& operation, uint32_t id, uint32_t generation) {
  const OpSpec& spec = operation.spec;
  const Reduction reduction = Reduction::of(spec, region.size());
  const bool scatter = spec.type == OpType::reducescatter;
  if (scatter) operation.outputs.resize(spec.tensors.size());
  size_t offset = 0;
  std::vector<const void*>& inputs = region.inputs();
  for (size_t i = 0; i < operation.spans.size(); ++i) {
    const TensorSpec& tensor = spec.tensors[i];
    size_t first = offset;
    auto count = static_cast<size_t>(operation.spans[i].count);
    std::byte* target = operation.spans[i].output;
    if (scatter) {
      const RowRange range = split_rows(tensor.rows(), region.size(), region.rank());
      HVD_TRY(make_rows(operation, i, range.count));
      target = operation.outputs[i].data.get();
      first += static_cast<size_t>(range.first * tensor.row_bytes());
      count = static_cast<size_t>(range.count * tensor.row_elements());
    }
    offset += static_cast<size_t>(operation.spans[i].count) * size_of(reduction.dtype);
    if (count == 0) continue;
    for (int member = 0; member < region.size(); ++member) {
      inputs[static_cast<size_t>(member)] = region.cell(member, id, generation) + first;
    }
    kernels::reduce(reduction.dtype, reduction.op, target, inputs.data(), region.size(), count, reduction.postscale);
  }
  return {};
}

void run_broadcast(Region& region, Operation& operation, uint32_t id, uint32_t generation) {
  const std::byte* source = region.cell(operation.spec.root, id, generation);
  for (size_t i = 0; i < operation.spans.size(); ++i) {
    const Span& span = operation.spans[i];
    const size_t bytes = static_cast<size_t>(span.count) * size_of(operation.spec.tensors[i].dtype);
    if (bytes > 0 && (span.output != span.input || operation.spec.root != region.rank())) {
      std::memcpy(span.output, source, bytes);
    }
    source += bytes;
  }
}

}  // namespace

bool is_eager(const OpSpec& spec, uint32_t id, int size) {
  if (id >= kEagerIds || spec.device != DeviceKind::cpu) return false;
  switch (spec.type) {
    case OpType::allgather:
    case OpType::alltoall:
      return counts_of(spec, size) <= kMaxCounts;
    case OpType::allreduce:
    case OpType::broadcast:
    case OpType::reducescatter:
      break;
    default:
      return false;
  }
  if (spec.reduce_op == ReduceOp::adasum || averages_integers(spec)) return false;
  return spec.uniform_dtype() && spec.bytes() <= kEagerBytes;
}

void store_eager(Region& region, const Operation& operation, uint32_t id, uint32_t generation) {
  const OpSpec& spec = operation.spec;
  if (tells_rows(spec)) {
    store_rows(header(region, region.rank(), id, generation), operation, region.size());
    return;
  }
  if (spec.type == OpType::broadcast && spec.root != region.rank()) return;
  std::byte* cell = region.cell(region.rank(), id, generation);
  const DType dtype = spec.tensors[0].dtype;
  for (const Span& span : operation.spans) {
    const size_t bytes = static_cast<size_t>(span.count) * size_of(dtype);
    if (bytes == 0) continue;
    if (spec.type != OpType::broadcast && spec.prescale != 1.0) {
      kernels::scale(dtype, cell, span.input, static_cast<size_t>(span.count), spec.prescale);
    } else {
      std::memcpy(cell, span.input, bytes);
    }
    cell += bytes;
  }
}

bool is_complete(const Region& region, const OpSpec& spec, uint32_t id, uint32_t generation) {
  if (!tells_rows(spec)) return true;
  for (int member = 0; member < region.size(); ++member) {
    if (header(region, member, id, generation).fits == 0) return false;
  }
  return true;
}

Status run_eager(Region& region, Operation& operation, uint32_t id, uint32_t generation) {
  const OpType type = operation.spec.type;
  if (type == OpType::broadcast) {
    run_broadcast(region, operation, id, generation);
    return {};
  }
  if (!tells_rows(operation.spec)) return run_reduction(region, operation, id, generation);
  std::vector<const RowsHeader*> cells;
  for (int member = 0; member < region.size(); ++member) cells.push_back(&header(region, member, id, generation));
  return type == OpType::allgather ? run_allgather(region, operation, cells) : run_alltoall(region, operation, cells);
}

void take_rows(const Region& region, Operation& operation, uint32_t id, uint32_t generation) {
  const auto count = static_cast<std::ptrdiff_t>(counts_of(operation.spec, region.size()));
  for (int member = 0; member < region.size(); ++member) {
    const int64_t* const counts = header(region, member, id, generation).counts;
    operation.told_rows.insert(operation.told_rows.end(), counts, counts + count);
  }
}

}  // namespace horovod::shared
