// Allreduce, Adasum and broadcast: elements that stay where they are.
#include "backends/staging/collectives.h"

#include <cstring>

#include "backends/staging/chunks.h"

namespace horovod::staging {
namespace {

// Runs a chunk that is reduced or sent in place.
Status in_place(Run& run, const OpSpec& like, const SpanList& list, DType dtype, bool comes, bool goes) {
  const auto item = static_cast<int64_t>(list.element_bytes());
  const int64_t window = window_bytes(run, 1, item) / item;
  int64_t begin = 0;
  return run.pipeline.run(
      [&](Chunk& chunk) {
        if (begin >= list.elements()) return false;
        const int64_t count = part_of(list.elements(), begin, window);
        if (comes) inputs_of(list, begin, begin + count, 0, chunk.in);
        if (goes) outputs_of(list, begin, begin + count, 0, chunk.out);
        chunk.work = [&, count](std::byte* buffer) {
          Operation operation;
          put_on_host(operation, like, dtype, {count});
          operation.spans = {{buffer, buffer, count}};
          return run_on_host(run, operation);
        };
        begin += count;
        return true;
      },
      run.what);
}

// Copies between the device and the host's memory `data`, in which a span lies at its place in the list.
Status carry(Run& run, const SpanList& list, std::byte* data, bool to_host) {
  const int64_t window = window_bytes(run, 1);
  int64_t begin = 0;
  return run.pipeline.run(
      [&](Chunk& chunk) {
        if (begin >= list.elements()) return false;
        const int64_t count = part_of(list.elements(), begin, window);
        if (to_host) {
          inputs_of(list, begin, begin + count, 0, chunk.in);
        } else {
          outputs_of(list, begin, begin + count, 0, chunk.out);
        }
        chunk.work = [=](std::byte* buffer) -> Status {
          std::byte* const there = data + begin;
          std::memcpy(to_host ? there : buffer, to_host ? buffer : there, static_cast<size_t>(count));
          return {};
        };
        begin += count;
        return true;
      },
      run.what);
}

}  // namespace

Status allreduce(Run& run, Batch batch) {
  return for_each_dtype(batch, [&](DType dtype) -> Status {
    std::vector<Span> spans;
    HVD_TRY(for_each_tensor(batch, [&](Operation& operation, size_t t) -> Status {
      if (operation.spec.tensors[t].dtype == dtype) spans.push_back(operation.spans[t]);
      return {};
    }));
    return in_place(run, batch[0]->spec, SpanList(spans, dtype), dtype, true, true);
  });
}

Status adasum(Run& run, Batch batch) {
  std::vector<Span> bytes;
  size_t total = 0;
  for (Operation* operation : batch) {
    for (size_t t = 0; t < operation->spans.size(); ++t) {
      const Span& span = operation->spans[t];
      bytes.push_back(
          {span.input, span.output, span.count * static_cast<int64_t>(size_of(operation->spec.tensors[t].dtype))});
      total += static_cast<size_t>(bytes.back().count);
    }
  }
  OutputBuffer memory;
  if (!memory.allocate(total)) {
    return {Code::internal, error_code::out_of_memory,
            "There is no memory for the " + std::to_string(total) + " bytes of " + run.what +
                ", whose Adasum is computed by the host."};
  }
  const SpanList list(bytes, DType::uint8);
  HVD_TRY(carry(run, list, memory.data.get(), true));
  std::byte* at = memory.data.get();
  size_t item = 0;
  for (Operation* operation : batch) {
    Operation host;
    host.spec = operation->spec;
    host.spec.device = DeviceKind::cpu;
    for (const Span& span : operation->spans) {
      host.spans.push_back({at, at, span.count});
      at += bytes[item++].count;
    }
    HVD_TRY(run_on_host(run, host));
  }
  return carry(run, list, memory.data.get(), false);
}

Status broadcast(Run& run, Batch batch) {
  std::vector<Span> bytes;
  bool apart = false;
  for (Operation* operation : batch) {
    for (size_t t = 0; t < operation->spans.size(); ++t) {
      const Span& span = operation->spans[t];
      const auto item = static_cast<int64_t>(size_of(operation->spec.tensors[t].dtype));
      bytes.push_back({span.input, span.output, span.count * item});
      apart = apart || span.input != span.output;
    }
  }
  const bool root = batch[0]->spec.root == run.rank();
  return in_place(run, batch[0]->spec, SpanList(bytes, DType::uint8), DType::uint8, root, !root || apart);
}

}  // namespace horovod::staging
