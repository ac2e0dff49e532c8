#include <cstring>

#include <gloo/allreduce.h>
#include <gloo/alltoallv.h>
#include <gloo/broadcast.h>

#include "backends/gloo/plugin/collectives.h"
#include "kernels/kernels.h"

namespace horovod::gloo_plugin {
namespace {

// output = factor * input
void scaled_copy(DType dtype, void* output, const void* input, int64_t count, double factor) {
  if (factor != 1.0 && dtype != DType::boolean) {
    kernels::scale(dtype, output, input, static_cast<size_t>(count), factor);
  } else if (output != input) {
    std::memcpy(output, input, static_cast<size_t>(count) * size_of(dtype));
  }
}

// The elements of a batch as one array, which Gloo needs: the output itself if there is only one span.
class Whole {
 public:
  explicit Whole(const SpanList& list) : list_(list) {
    int spans = 0;
    list_.visit(0, list_.elements(), [&](const std::byte*, std::byte* output, int64_t, int64_t) {
      data_ = output;
      ++spans;
    });
    if (spans == 1) return;
    data_ = buffer_.allocate(bytes()) ? buffer_.data.get() : nullptr;
  }

  std::byte* data() const { return data_; }  // null when there is no memory
  size_t bytes() const { return static_cast<size_t>(list_.elements()) * list_.element_bytes(); }

  void fill(DType dtype, double factor) {
    list_.visit(0, list_.elements(), [&](const std::byte* input, std::byte*, int64_t count, int64_t offset) {
      scaled_copy(dtype, at(offset), input, count, factor);
    });
  }
  void empty(DType dtype, double factor) {
    list_.visit(0, list_.elements(), [&](const std::byte*, std::byte* output, int64_t count, int64_t offset) {
      scaled_copy(dtype, output, at(offset), count, factor);
    });
  }

 private:
  std::byte* at(int64_t offset) const { return data_ + static_cast<size_t>(offset) * list_.element_bytes(); }

  const SpanList& list_;
  OutputBuffer buffer_;
  std::byte* data_ = nullptr;
};

// Gloo cuts buffers at whole elements, so it gets a type of their size. Only our kernels know the real type.
void set_output(::gloo::AllreduceOptions& options, void* data, size_t count, size_t element_bytes) {
  switch (element_bytes) {
    case 1:
      return options.setOutput(static_cast<uint8_t*>(data), count);
    case 2:
      return options.setOutput(static_cast<uint16_t*>(data), count);
    case 4:
      return options.setOutput(static_cast<uint32_t*>(data), count);
    default:
      return options.setOutput(static_cast<uint64_t*>(data), count);
  }
}

}  // namespace

Status allreduce(Run run, Batch batch) {
  const SpanList list(batch);
  if (list.elements() == 0) return {};
  const Reduction reduction = Reduction::of(batch[0]->spec, run.size());
  Whole whole(list);
  if (!whole.data()) return no_memory(*batch[0]);
  whole.fill(reduction.dtype, reduction.prescale);
  auto options = run.options<::gloo::AllreduceOptions>();
  set_output(options, whole.data(), static_cast<size_t>(list.elements()), list.element_bytes());
  options.setReduceFunction([&](void* output, const void* a, const void* b, size_t count) {
    const void* inputs[] = {a, b};
    kernels::reduce(reduction.dtype, reduction.op, output, inputs, 2, count, 1.0);
  });
  ::gloo::allreduce(options);
  whole.empty(reduction.dtype, reduction.postscale);
  return {};
}

Status broadcast(Run run, Batch batch) {
  const SpanList list(batch);
  if (list.elements() == 0) return {};
  const DType dtype = batch[0]->spec.tensors[0].dtype;
  Whole whole(list);
  if (!whole.data()) return no_memory(*batch[0]);
  const bool sends = batch[0]->spec.root == run.rank();
  if (sends) whole.fill(dtype, 1.0);
  auto options = run.options<::gloo::BroadcastOptions>();
  options.setRoot(batch[0]->spec.root);
  options.setOutput(reinterpret_cast<uint8_t*>(whole.data()), whole.bytes());
  ::gloo::broadcast(options);
  whole.empty(dtype, 1.0);
  return {};
}

// Gloo's own reduce-scatter knows only numbers of C++ and up to 2^31 of them.
Status reducescatter(Run run, Batch batch) {
  if (batch.empty() || batch[0]->spec.tensors.empty()) return {};
  const int n = run.size();
  const Reduction reduction = Reduction::of(batch[0]->spec, n);
  for (Operation* operation : batch) {
    const OpSpec& spec = operation->spec;
    operation->outputs.resize(spec.tensors.size());
    for (size_t t = 0; t < spec.tensors.size(); ++t) {
      const TensorSpec& tensor = spec.tensors[t];
      const int64_t row_bytes = tensor.row_bytes();
      const RowRange mine = split_rows(tensor.rows(), n, run.rank());
      const int64_t part = mine.count * row_bytes;
      HVD_TRY(make_rows(*operation, t, mine.count));
      OutputBuffer received;
      if (!received.allocate(static_cast<size_t>(part * n))) return no_memory(*operation);
      if (tensor.elements() == 0) continue;
      std::vector<int64_t> sent(n);
      for (int member = 0; member < n; ++member) sent[member] = split_rows(tensor.rows(), n, member).count * row_bytes;
      auto options = run.options<::gloo::AlltoallvOptions>();
      auto* input = const_cast<std::byte*>(operation->spans[t].input);
      options.setInput(reinterpret_cast<uint8_t*>(input), std::move(sent));
      options.setOutput(reinterpret_cast<uint8_t*>(received.data.get()), std::vector<int64_t>(n, part));
      ::gloo::alltoallv(options);
      if (part == 0) continue;
      const int64_t elements = mine.count * tensor.row_elements();
      std::vector<const void*> parts(n);
      for (int member = 0; member < n; ++member) {
        std::byte* rows = received.data.get() + part * member;
        scaled_copy(reduction.dtype, rows, rows, elements, reduction.prescale);
        parts[member] = rows;
      }
      kernels::reduce(reduction.dtype, reduction.op, operation->outputs[t].data.get(), parts.data(), n,
                      static_cast<size_t>(elements), reduction.postscale);
    }
  }
  return {};
}

}  // namespace horovod::gloo_plugin
