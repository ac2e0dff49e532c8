#include "backends/nccl/collectives.h"

#include <cstring>
#include <limits>
#include <map>

#include "backends/nccl/reduction.h"

namespace horovod::nccl {
namespace {

constexpr int64_t kMostRows = int64_t{1} << 48;  // a larger count is no count

int64_t row_bytes(const TensorSpec& tensor) {
  return tensor.row_elements() * static_cast<int64_t>(size_of(tensor.dtype));
}

template <typename Visit>
Status for_each_tensor(Batch batch, Visit&& visit) {
  for (Operation* operation : batch) {
    for (size_t t = 0; t < operation->spec.tensors.size(); ++t) HVD_TRY(visit(*operation, t));
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
    return for_each_tensor(batch, [&](Operation& operation, size_t t) -> Status {
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

// Multiplies on the device: the sum of one rank's values, times a factor. from/to choose the memory of each tensor.
template <typename From, typename To>
Status scale(Run& run, Batch batch, const Plans& plans, Factor ReductionPlan::* which, From&& from, To&& to) {
  std::map<DType, int> ops;
  std::shared_ptr<Comm> alone;
  Status status = for_each_tensor(batch, [&](Operation& operation, size_t t) -> Status {
    const DType dtype = operation.spec.tensors[t].dtype;
    const ReductionPlan& plan = plans.of(dtype);
    if (!(plan.*which).needed() || ops.count(dtype) > 0) return {};
    if (!alone) HVD_TRY(run.alone(alone));
    int op = 0;
    HVD_TRY(alone->create_premul_sum(op, &(plan.*which).bits, plan.type));
    ops.emplace(dtype, op);
    return {};
  });
  if (ops.empty()) return status;
  if (status.ok()) {
    status = alone->group(run.peers, [&](CommHandle handle) {
      return for_each_tensor(batch, [&](Operation& operation, size_t t) -> Status {
        const Span& span = operation.spans[t];
        const DType dtype = operation.spec.tensors[t].dtype;
        const auto op = ops.find(dtype);
        if (span.count == 0 || op == ops.end()) return {};
        return alone->call(alone->library().all_reduce, from(span), static_cast<void*>(to(span)),
                           static_cast<size_t>(span.count), plans.of(dtype).type, op->second, handle, run.stream());
      });
    });
  }
  for (const auto& [dtype, op] : ops) alone->destroy_op(op);
  return status;
}

const void* input_of(const Span& span) { return span.input; }
std::byte* output_of(const Span& span) { return span.output; }

// Every member's row counts, tensor by tensor: counts[member * per_member + i].
Status exchange_counts(Run& run, const std::vector<int64_t>& mine, std::vector<int64_t>& counts) {
  std::vector<std::byte> all;
  HVD_TRY(run.peers.gather(mine.data(), mine.size() * sizeof(int64_t), all));
  counts.resize(mine.size() * static_cast<size_t>(run.size()));
  if (!counts.empty()) std::memcpy(counts.data(), all.data(), counts.size() * sizeof(int64_t));
  for (size_t i = 0; i < counts.size(); ++i) {
    if (counts[i] < 0 || counts[i] > kMostRows) {
      return {Code::aborted, run.peers.labels[i / mine.size()] + " says that it has " + std::to_string(counts[i]) +
                                 " rows, which can't be."};
    }
  }
  return {};
}

}  // namespace

Status Run::allocate(Operation& operation, size_t tensor, int64_t rows) const {
  const TensorSpec& spec = operation.spec.tensors[tensor];
  OutputBuffer& output = operation.outputs[tensor];
  output.shape = spec.shape;
  if (output.shape.empty()) output.shape = {0};
  output.shape[0] = rows;
  const cuda::Stream& on = *comm.stream();
  const auto bytes = static_cast<size_t>(rows * row_bytes(spec));
  Status status = on.device().allocate(bytes, comm.stream(), output);
  return status.ok() ? status : Status(status.code(), operation.spec.name + ": " + status.message());
}

Status allreduce(Run& run, Batch batch) {
  Plans plans(run.comm);
  HVD_TRY(plans.prepare(batch, run.size()));
  HVD_TRY(scale(run, batch, plans, &ReductionPlan::before, input_of, output_of));
  HVD_TRY(run.comm.group(run.peers, [&](CommHandle handle) {
    return for_each_tensor(batch, [&](Operation& operation, size_t t) -> Status {
      const Span& span = operation.spans[t];
      const ReductionPlan& plan = plans.of(operation.spec.tensors[t].dtype);
      if (span.count == 0) return {};
      const void* from = plan.before.needed() ? span.output : span.input;
      return run.comm.call(run.comm.library().all_reduce, from, static_cast<void*>(span.output),
                           static_cast<size_t>(span.count), plan.type, plan.op, handle, run.stream());
    });
  }));
  return scale(run, batch, plans, &ReductionPlan::after, output_of, output_of);
}

Status broadcast(Run& run, Batch batch) {
  return run.comm.group(run.peers, [&](CommHandle handle) {
    return for_each_tensor(batch, [&](Operation& operation, size_t t) -> Status {
      const Span& span = operation.spans[t];
      const size_t bytes = static_cast<size_t>(span.count) * size_of(operation.spec.tensors[t].dtype);
      if (bytes == 0) return {};
      return run.comm.call(run.comm.library().broadcast, static_cast<const void*>(span.input),
                           static_cast<void*>(span.output), bytes, kUint8, operation.spec.root, handle, run.stream());
    });
  });
}

Status allgather(Run& run, Batch batch) {
  const int n = run.size();
  std::vector<int64_t> mine, counts;
  HVD_TRY(for_each_tensor(batch, [&](Operation& operation, size_t t) -> Status {
    mine.push_back(operation.spec.tensors[t].rows());
    return {};
  }));
  HVD_TRY(exchange_counts(run, mine, counts));
  size_t item = 0;
  for (Operation* operation : batch) operation->outputs.resize(operation->spec.tensors.size());
  HVD_TRY(for_each_tensor(batch, [&](Operation& operation, size_t t) -> Status {
    int64_t rows = 0;
    for (int member = 0; member < n; ++member) rows += counts[mine.size() * member + item];
    ++item;
    return run.allocate(operation, t, rows);
  }));
  item = 0;
  const Library& library = run.comm.library();
  return run.comm.group(run.peers, [&](CommHandle handle) {
    return for_each_tensor(batch, [&](Operation& operation, size_t t) -> Status {
      const auto bytes_from = [&, item](int member) {
        return static_cast<size_t>(counts[mine.size() * member + item] * row_bytes(operation.spec.tensors[t]));
      };
      ++item;
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
  std::vector<int64_t> mine, counts;
  HVD_TRY(for_each_tensor(batch, [&](Operation& operation, size_t t) -> Status {
    for (int member = 0; member < n; ++member) {
      const bool even = operation.splits.empty();
      mine.push_back(even ? operation.spec.tensors[t].rows() / n : operation.splits[member]);
    }
    return {};
  }));
  HVD_TRY(exchange_counts(run, mine, counts));
  const auto received = [&](size_t item, int from) {
    return counts[mine.size() * from + item * static_cast<size_t>(n) + static_cast<size_t>(run.rank())];
  };
  size_t item = 0;
  for (Operation* operation : batch) {
    operation->outputs.resize(operation->spec.tensors.size());
    operation->received_splits.assign(n, 0);
  }
  HVD_TRY(for_each_tensor(batch, [&](Operation& operation, size_t t) -> Status {
    int64_t rows = 0;
    for (int member = 0; member < n; ++member) {
      const int64_t part = received(item, member);
      if (part > std::numeric_limits<int32_t>::max()) {
        return {Code::aborted, run.peers.labels[member] + " sends " + std::to_string(part) + " rows in " +
                                   operation.spec.name + ", more than a split can say."};
      }
      if (t == 0) operation.received_splits[member] = static_cast<int32_t>(part);
      rows += part;
    }
    ++item;
    return run.allocate(operation, t, rows);
  }));
  item = 0;
  const Library& library = run.comm.library();
  return run.comm.group(run.peers, [&](CommHandle handle) {
    return for_each_tensor(batch, [&](Operation& operation, size_t t) -> Status {
      const int64_t bytes_of_row = row_bytes(operation.spec.tensors[t]);
      const std::byte* from = operation.spans[t].input;
      std::byte* to = operation.outputs[t].data.get();
      for (int member = 0; member < n; ++member) {
        const auto out = static_cast<size_t>(mine[item * n + member] * bytes_of_row);
        const auto in = static_cast<size_t>(received(item, member) * bytes_of_row);
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
      ++item;
      return {};
    });
  });
}

Status reducescatter(Run& run, Batch batch) {
  const int n = run.size();
  Plans plans(run.comm);
  HVD_TRY(plans.prepare(batch, n));
  for (Operation* operation : batch) operation->outputs.resize(operation->spec.tensors.size());
  HVD_TRY(for_each_tensor(batch, [&](Operation& operation, size_t t) {
    return run.allocate(operation, t, split_rows(operation.spec.tensors[t].rows(), n, run.rank()).count);
  }));
  const Library& library = run.comm.library();
  return run.comm.group(run.peers, [&](CommHandle handle) {
    return for_each_tensor(batch, [&](Operation& operation, size_t t) -> Status {
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
