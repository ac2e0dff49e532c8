#include "backends/nccl/collectives.h"

#include <cstring>
#include <map>

#include "backends/nccl/reduction.h"
#include "collectives/rows.h"

namespace horovod::nccl {
namespace {

// Calls visit(operation, place of the tensor in it, place in the batch) for each tensor.
template <typename Visit>
Status for_each_tensor(Batch batch, Visit&& visit) {
  size_t item = 0;
  for (Operation* operation : batch) {
    for (size_t t = 0; t < operation->spec.tensors.size(); ++t) HVD_TRY(visit(*operation, t, item++));
  }
  return {};
}

// The plans of a batch by dtype, with the operations that NCCL has for their factors while the batch is queued.
class Plans {
 public:
  explicit Plans(Comm& comm) : comm_(comm) {}
  ~Plans() {
    for (auto& [dtype, plan] : plans_) {
      if (plan.premul.needed()) comm_.destroy_op(plan.op);
    }
  }
  Plans(const Plans&) = delete;
  Plans& operator=(const Plans&) = delete;

  Status prepare(Batch batch, int size) {
    return for_each_tensor(batch, [&](Operation& operation, size_t t, size_t) -> Status {
      const DType dtype = operation.spec.tensors[t].dtype;
      if (plans_.count(dtype) > 0) return {};
      ReductionPlan plan;
      HVD_TRY(plan_reduction(operation.spec, dtype, size, plan));
      if (plan.premul.needed()) HVD_TRY(comm_.create_premul_sum(plan.op, &plan.premul.bits, plan.type));
      plans_.emplace(dtype, plan);
      return {};
    });
  }
  const ReductionPlan& of(DType dtype) const { return plans_.at(dtype); }

 private:
  Comm& comm_;
  std::map<DType, ReductionPlan> plans_;
};

using Pieces = std::vector<Piece>;

// Multiplies on the device: a sum over this rank alone, times a factor.
Status scale(Run& run, const Pieces& pieces, const Plans& plans, Factor ReductionPlan::* which) {
  std::map<DType, int> ops;
  std::shared_ptr<Comm> alone;
  const auto make_ops = [&]() -> Status {
    for (const Piece& piece : pieces) {
      const ReductionPlan& plan = plans.of(piece.dtype);
      if (!(plan.*which).needed() || ops.count(piece.dtype) > 0) continue;
      if (!alone) HVD_TRY(run.alone(alone));
      int op = 0;
      HVD_TRY(alone->create_premul_sum(op, &(plan.*which).bits, plan.type));
      ops.emplace(piece.dtype, op);
    }
    return {};
  };
  Status status = make_ops();
  if (ops.empty()) return status;
  if (status.ok()) {
    status = alone->group(run.peers, [&](CommHandle handle) -> Status {
      for (const Piece& piece : pieces) {
        const auto op = ops.find(piece.dtype);
        if (op == ops.end()) continue;
        const std::byte* from = which == &ReductionPlan::before ? piece.input : piece.output;
        HVD_TRY(alone->call(alone->library().all_reduce, static_cast<const void*>(from),
                            static_cast<void*>(piece.output), piece.count(), plans.of(piece.dtype).type, op->second,
                            handle, run.stream()));
      }
      return {};
    });
  }
  for (const auto& [dtype, op] : ops) alone->destroy_op(op);
  return status;
}

// How many rows each member has for each other; members tell each other over the CPU.
class RowCounts {
 public:
  // mine(operation, t, i): this member's count number i, of `width` for each tensor.
  template <typename Mine>
  Status exchange(Run& run, Batch batch, int width, Mine&& mine) {
    width_ = static_cast<size_t>(width);
    std::vector<int64_t> told;
    HVD_TRY(for_each_tensor(batch, [&](Operation& operation, size_t t, size_t) -> Status {
      for (int i = 0; i < width; ++i) told.push_back(mine(operation, t, i));
      return {};
    }));
    per_member_ = told.size();
    return run.peers.exchange_counts(told, counts_);
  }
  int64_t of(int member, size_t item, int i = 0) const {
    return counts_[per_member_ * static_cast<size_t>(member) + item * width_ + static_cast<size_t>(i)];
  }

 private:
  size_t width_ = 1, per_member_ = 0;
  std::vector<int64_t> counts_;
};

// Result memory for every tensor of the batch; rows_of(operation, t, item, rows) adds up how many rows it has.
template <typename RowsOf>
Status allocate_all(Run& run, Batch batch, RowsOf&& rows_of) {
  for (Operation* operation : batch) operation->outputs.resize(operation->spec.tensors.size());
  return for_each_tensor(batch, [&](Operation& operation, size_t t, size_t item) -> Status {
    int64_t rows = 0;
    HVD_TRY(rows_of(operation, t, item, rows));
    return run.comm.stream()->device().allocate_rows(operation, t, rows, run.comm.stream());
  });
}

}  // namespace

Status allreduce(Run& run, Batch batch) {
  Plans plans(run.comm);
  HVD_TRY(plans.prepare(batch, run.size()));
  PackedBatch packed;
  HVD_TRY(packed.plan(batch, false, run.size() == 1, run.comm.stream(), run.packing));
  HVD_TRY(packed.pack());
  HVD_TRY(scale(run, packed.pieces(), plans, &ReductionPlan::before));
  HVD_TRY(run.comm.group(run.peers, [&](CommHandle handle) -> Status {
    for (const Piece& piece : packed.pieces()) {
      const ReductionPlan& plan = plans.of(piece.dtype);
      const void* from = plan.before.needed() ? piece.output : piece.input;
      HVD_TRY(run.comm.call(run.comm.library().all_reduce, from, static_cast<void*>(piece.output), piece.count(),
                            plan.type, plan.op, handle, run.stream()));
    }
    return {};
  }));
  HVD_TRY(scale(run, packed.pieces(), plans, &ReductionPlan::after));
  return packed.unpack(false);
}

Status broadcast(Run& run, Batch batch) {
  const int root = batch[0]->spec.root;
  PackedBatch packed;
  HVD_TRY(packed.plan(batch, true, run.size() == 1, run.comm.stream(), run.packing));
  if (run.rank() == root) HVD_TRY(packed.pack());
  HVD_TRY(run.comm.group(run.peers, [&](CommHandle handle) -> Status {
    for (const Piece& piece : packed.pieces()) {
      HVD_TRY(run.comm.call(run.comm.library().broadcast, static_cast<const void*>(piece.input),
                            static_cast<void*>(piece.output), piece.bytes, kUint8, root, handle, run.stream()));
    }
    return {};
  }));
  return packed.unpack(run.rank() == root);
}

Status allgather(Run& run, Batch batch) {
  const int n = run.size();
  RowCounts counts;
  HVD_TRY(counts.exchange(run, batch, 1,
                          [](Operation& operation, size_t t, int) { return operation.spec.tensors[t].rows(); }));
  HVD_TRY(allocate_all(run, batch, [&](Operation& operation, size_t, size_t item, int64_t& rows) -> Status {
    for (int member = 0; member < n; ++member) {
      HVD_TRY(add_rows(operation, run.peers.labels[member], counts.of(member, item), rows));
    }
    return {};
  }));
  const Library& library = run.comm.library();
  return run.comm.group(run.peers, [&](CommHandle handle) {
    return for_each_tensor(batch, [&](Operation& operation, size_t t, size_t item) -> Status {
      const auto bytes_from = [&](int member) {
        return static_cast<size_t>(counts.of(member, item) * operation.spec.tensors[t].row_bytes());
      };
      const void* input = operation.spans[t].input;
      std::byte* output = operation.outputs[t].data.get();
      bool even = true;
      for (int member = 0; member < n; ++member) even = even && bytes_from(member) == bytes_from(0);
      if (even && bytes_from(0) == 0) return {};
      if (even) {
        return run.comm.call(library.all_gather, input, static_cast<void*>(output), bytes_from(0), kUint8, handle,
                             run.stream());
      }
      for (int member = 0; member < n; ++member) {
        const size_t bytes = bytes_from(member);
        if (bytes == 0) continue;
        HVD_TRY(run.comm.call(library.broadcast, member == run.rank() ? input : output, static_cast<void*>(output),
                              bytes, kUint8, member, handle, run.stream()));
        output += bytes;
      }
      return {};
    });
  });
}

Status alltoall(Run& run, Batch batch) {
  const int n = run.size();
  RowCounts counts;  // count number i is for member i
  HVD_TRY(counts.exchange(
      run, batch, n, [&](Operation& operation, size_t t, int member) { return rows_to(operation, t, member, n); }));
  HVD_TRY(allocate_all(run, batch, [&](Operation& operation, size_t t, size_t item, int64_t& rows) -> Status {
    for (int member = 0; member < n; ++member) {
      const int64_t part = counts.of(member, item, run.rank());
      HVD_TRY(add_split(operation, t, member, n, run.peers.labels[member], part, rows));
    }
    return {};
  }));
  const Library& library = run.comm.library();
  return run.comm.group(run.peers, [&](CommHandle handle) {
    return for_each_tensor(batch, [&](Operation& operation, size_t t, size_t item) -> Status {
      const int64_t bytes_of_row = operation.spec.tensors[t].row_bytes();
      const std::byte* from = operation.spans[t].input;
      std::byte* to = operation.outputs[t].data.get();
      for (int member = 0; member < n; ++member) {
        const auto out = static_cast<size_t>(counts.of(run.rank(), item, member) * bytes_of_row);
        const auto in = static_cast<size_t>(counts.of(member, item, run.rank()) * bytes_of_row);
        if (out > 0) {
          HVD_TRY(
              run.comm.call(library.send, static_cast<const void*>(from), out, kUint8, member, handle, run.stream()));
        }
        if (in > 0) {
          HVD_TRY(run.comm.call(library.receive, static_cast<void*>(to), in, kUint8, member, handle, run.stream()));
        }
        from += out;
        to += in;
      }
      return {};
    });
  });
}

Status reducescatter(Run& run, Batch batch) {
  const int n = run.size();
  Plans plans(run.comm);
  HVD_TRY(plans.prepare(batch, n));
  HVD_TRY(allocate_all(run, batch, [&](Operation& operation, size_t t, size_t, int64_t& rows) -> Status {
    rows = split_rows(operation.spec.tensors[t].rows(), n, run.rank()).count;
    return {};
  }));
  const Library& library = run.comm.library();
  return run.comm.group(run.peers, [&](CommHandle handle) {
    return for_each_tensor(batch, [&](Operation& operation, size_t t, size_t) -> Status {
      const TensorSpec& tensor = operation.spec.tensors[t];
      const ReductionPlan& plan = plans.of(tensor.dtype);
      const std::byte* input = operation.spans[t].input;
      void* output = operation.outputs[t].data.get();
      if (tensor.elements() == 0) return {};
      if (tensor.rows() % n == 0) {
        const auto count = static_cast<size_t>(tensor.elements() / n);
        return run.comm.call(library.reduce_scatter, static_cast<const void*>(input), output, count, plan.type, plan.op,
                             handle, run.stream());
      }
      for (int member = 0; member < n; ++member) {
        const auto count = static_cast<size_t>(split_rows(tensor.rows(), n, member).count * tensor.row_elements());
        if (count == 0) continue;
        HVD_TRY(run.comm.call(library.reduce, static_cast<const void*>(input), output, count, plan.type, plan.op,
                              member, handle, run.stream()));
        input += count * size_of(tensor.dtype);
      }
      return {};
    });
  });
}

}  // namespace horovod::nccl
