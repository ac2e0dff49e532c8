// A batch: operations that run as one. Their spans form one virtual array of elements, so that an algorithm cuts it
// where it likes and no fusion buffer is needed.
#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include <sys/uio.h>

#include "collectives/operation.h"

namespace horovod {

using Batch = std::span<Operation* const>;

// What a reduction computes, with Average folded in: postscale * REDUCE(prescale * x).
struct Reduction {
  DType dtype;
  ReduceOp op;
  double prescale;
  double postscale;

  static Reduction of(const OpSpec& spec, int size) {
    const bool average = spec.reduce_op == ReduceOp::average;
    return {spec.tensors[0].dtype, average ? ReduceOp::sum : spec.reduce_op, spec.prescale,
            average ? spec.postscale / size : spec.postscale};
  }
};

// The virtual array. All tensors have one dtype.
class SpanList {
 public:
  explicit SpanList(Batch batch) {
    for (Operation* operation : batch) {
      for (const Span& span : operation->spans) add(span);
    }
    if (!batch.empty() && !batch[0]->spec.tensors.empty()) element_bytes_ = size_of(batch[0]->spec.tensors[0].dtype);
  }
  SpanList(std::span<const Span> spans, DType dtype) : element_bytes_(size_of(dtype)) {
    for (const Span& span : spans) add(span);
  }
  // An array whose inputs are the outputs of the batch, as well as its outputs.
  static SpanList in_place(Batch batch) {
    std::vector<Span> spans;
    for (const Operation* operation : batch) {
      for (const Span& span : operation->spans) spans.push_back({span.output, span.output, span.count});
    }
    return SpanList(spans, batch[0]->spec.tensors[0].dtype);
  }

  int64_t elements() const { return starts_.empty() ? 0 : starts_.back() + spans_.back().count; }
  size_t element_bytes() const { return element_bytes_; }

  // Calls visit(input, output, count, offset) for each contiguous piece of elements [begin, end); offset counts
  // elements from begin.
  template <typename Visit>
  void visit(int64_t begin, int64_t end, Visit&& visit) const {
    if (begin >= end) return;
    size_t i = std::upper_bound(starts_.begin(), starts_.end(), begin) - starts_.begin() - 1;
    for (int64_t at = begin; at < end; ++i) {
      const int64_t inside = at - starts_[i];
      const int64_t count = std::min(end - at, spans_[i].count - inside);
      const size_t bytes = static_cast<size_t>(inside) * element_bytes_;
      visit(spans_[i].input + bytes, spans_[i].output ? spans_[i].output + bytes : nullptr, count, at - begin);
      at += count;
    }
  }

  // Appends the pieces of elements [begin, end), for scatter/gather I/O.
  void inputs(int64_t begin, int64_t end, std::vector<iovec>& pieces) const {
    visit(begin, end, [&](const std::byte* input, std::byte*, int64_t count, int64_t) {
      pieces.push_back({const_cast<std::byte*>(input), static_cast<size_t>(count) * element_bytes_});
    });
  }
  void outputs(int64_t begin, int64_t end, std::vector<iovec>& pieces) const {
    visit(begin, end, [&](const std::byte*, std::byte* output, int64_t count, int64_t) {
      pieces.push_back({output, static_cast<size_t>(count) * element_bytes_});
    });
  }

 private:
  void add(const Span& span) {
    if (span.count == 0) return;
    starts_.push_back(elements());
    spans_.push_back(span);
  }

  std::vector<Span> spans_;      // no span is empty
  std::vector<int64_t> starts_;  // first element of each span in the virtual array
  size_t element_bytes_ = 1;
};

// Rows [first, first + count) that member `index` of `size` owns when `rows` rows are split by reducescatter: the first
// rows % size members own one row more (API of Horovod, section reducescatter).
struct RowRange {
  int64_t first;
  int64_t count;
};
constexpr RowRange split_rows(int64_t rows, int size, int index) {
  const int64_t base = rows / size;
  const int64_t extra = rows % size;
  return {base * index + std::min<int64_t>(index, extra), base + (index < extra ? 1 : 0)};
}

}  // namespace horovod
