#include "collectives/averages.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "collectives/rows.h"
#include "collectives/topology.h"
#include "kernels/kernels.h"

namespace horovod {
namespace {

// elements of an allreduce that are widened at a time
constexpr int64_t kWindow = int64_t{1} << 20;

template <typename Visit>
void with_type(DType dtype, Visit&& visit) {
  switch (dtype) {
    case DType::uint8:
      return visit(uint8_t{});
    case DType::int8:
      return visit(int8_t{});
    case DType::uint16:
      return visit(uint16_t{});
    case DType::int16:
      return visit(int16_t{});
    case DType::uint32:
      return visit(uint32_t{});
    case DType::int32:
      return visit(int32_t{});
    case DType::uint64:
      return visit(uint64_t{});
    case DType::int64:
      return visit(int64_t{});
    default:
      return;  // averages_integers() lets no other in
  }
}

// Wraps around, as sums of the kernels do.
int64_t add(int64_t a, int64_t b) { return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b)); }

template <typename T>
T nearest(double value) {
  if (std::isnan(value)) return 0;
  // As doubles the limits of 64 bits are rounded, so what equals one is the limit.
  if (value <= static_cast<double>(std::numeric_limits<T>::min())) return std::numeric_limits<T>::min();
  if (value >= static_cast<double>(std::numeric_limits<T>::max())) return std::numeric_limits<T>::max();
  return static_cast<T>(value);
}

// Elements of one dtype, as the tensor has them and widened.
class Wide {
 public:
  Wide(const OpSpec& spec, int size)
      : dtype_(spec.tensors[0].dtype), size_(size), prescale_(spec.prescale), postscale_(spec.postscale) {}

  DType dtype() const { return dtype_; }
  // Whether an element becomes two numbers, the second ones in an array of their own. If not, `second` below is not
  // used.
  bool is_split() const { return size_of(dtype_) == sizeof(int64_t); }

  void widen(const std::byte* input, int64_t count, int64_t* first, int64_t* second) const {
    if (prescale_ == 1.0) return widen_scaled(input, count, first, second);
    constexpr int64_t kBlock = 512;
    alignas(int64_t) std::byte scaled[kBlock * sizeof(int64_t)];
    for (int64_t begin = 0; begin < count; begin += kBlock) {
      const int64_t block = std::min(kBlock, count - begin);
      kernels::scale(dtype_, scaled, input + static_cast<size_t>(begin) * size_of(dtype_), static_cast<size_t>(block),
                     prescale_);
      widen_scaled(scaled, block, first + begin, second + begin);
    }
  }

  void narrow(const int64_t* first, const int64_t* second, int64_t count, std::byte* output) const {
    with_type(dtype_, [&]<typename T>(T) {
      for (int64_t i = 0; i < count; ++i) {
        const T value = average<T>(first[i], sizeof(T) == sizeof(int64_t) ? second[i] : 0);
        std::memcpy(output + static_cast<size_t>(i) * sizeof(T), &value, sizeof(T));
      }
    });
  }

 private:
  void widen_scaled(const std::byte* values, int64_t count, int64_t* first, int64_t* second) const {
    with_type(dtype_, [&]<typename T>(T) {
      for (int64_t i = 0; i < count; ++i) {
        T value;
        std::memcpy(&value, values + static_cast<size_t>(i) * sizeof(T), sizeof(T));  // of any alignment
        if constexpr (sizeof(T) < sizeof(int64_t)) {
          first[i] = static_cast<int64_t>(value);
        } else {
          T quotient = value / static_cast<T>(size_);
          T rest = value % static_cast<T>(size_);
          if constexpr (std::is_signed_v<T>) {
            if (rest < 0) {  // downward, so that the rest is not negative
              --quotient;
              rest += static_cast<T>(size_);
            }
          }
          first[i] = static_cast<int64_t>(quotient);
          second[i] = static_cast<int64_t>(rest);
        }
      }
    });
  }

  // The sum is `first`, or first * size + second where elements are split.
  template <typename T>
  T average(int64_t first, int64_t second) const {
    if constexpr (sizeof(T) < sizeof(int64_t)) {
      return postscale_ == 1.0 ? static_cast<T>(first / size_) : scaled<T>(static_cast<double>(first));
    } else {
      // The average, rounded downward. It fits T, though `first` alone may be just below the least T and wrap around.
      const auto floor = static_cast<T>(add(first, second / size_));
      const int64_t rest = second % size_;
      if (postscale_ != 1.0) return scaled<T>(static_cast<double>(floor) * size_ + static_cast<double>(rest));
      if constexpr (std::is_signed_v<T>) {
        if (floor < 0 && rest != 0) return floor + 1;  // toward zero
      }
      return floor;
    }
  }

  // In this order, a sum that n divides is divided exactly.
  template <typename T>
  T scaled(double sum) const {
    return nearest<T>(sum * postscale_ / size_);
  }

  const DType dtype_;
  const int size_;
  const double prescale_, postscale_;
};

Status no_memory(const Operation& operation) {
  return {Code::internal, error_code::out_of_memory,
          "Not enough memory for the average of integers of " + operation.spec.name + "."};
}

// A sum of int64, of the same type as `like`.
void begin_sum(const OpSpec& like, Operation& sum) {
  sum.spec.set_arguments(like);
  sum.spec.name = like.name;
  sum.spec.reduce_op = ReduceOp::sum;
  sum.spec.prescale = sum.spec.postscale = 1.0;
}

Status run_sum(const DataPlane& plane, Operation& sum) {
  Operation* one[] = {&sum};
  return run_batch(plane, one);
}

Status allreduce(const DataPlane& plane, Batch batch, const Wide& wide) {
  const SpanList list(batch);
  const int64_t elements = list.elements();
  const int64_t window = std::min(elements, kWindow);
  const int64_t arrays = wide.is_split() ? 2 : 1;
  OutputBuffer memory;
  if (!memory.allocate(static_cast<size_t>(arrays * window) * sizeof(int64_t))) return no_memory(*batch[0]);
  auto* const first = reinterpret_cast<int64_t*>(memory.data.get());
  for (int64_t begin = 0; begin < elements; begin += window) {
    const int64_t count = std::min(window, elements - begin);
    int64_t* const second = first + (arrays - 1) * count;
    list.visit(begin, begin + count, [&](const std::byte* input, std::byte*, int64_t n, int64_t at) {
      wide.widen(input, n, first + at, second + at);
    });
    Operation sum;
    begin_sum(batch[0]->spec, sum);
    sum.spec.tensors = {{DType::int64, {arrays * count}}};
    sum.spans = {{memory.data.get(), memory.data.get(), arrays * count}};
    HVD_TRY(run_sum(plane, sum));
    list.visit(begin, begin + count, [&](const std::byte*, std::byte* output, int64_t n, int64_t at) {
      wide.narrow(first + at, second + at, n, output);
    });
  }
  return {};
}

// Results have rows of their own, so all tensors are widened at once.
Status reducescatter(const DataPlane& plane, Operation& operation, const Wide& wide) {
  Operation sum;
  begin_sum(operation.spec, sum);
  std::vector<OutputBuffer> memory;
  const size_t arrays = wide.is_split() ? 2 : 1;
  for (size_t i = 0; i < operation.spans.size(); ++i) {
    const int64_t count = operation.spans[i].count;
    int64_t* halves[2] = {};
    for (size_t half = 0; half < arrays; ++half) {
      if (!memory.emplace_back().allocate(static_cast<size_t>(count) * sizeof(int64_t))) return no_memory(operation);
      halves[half] = reinterpret_cast<int64_t*>(memory.back().data.get());
      sum.spec.tensors.push_back({DType::int64, operation.spec.tensors[i].shape});
      sum.spans.push_back({memory.back().data.get(), nullptr, count});
    }
    wide.widen(operation.spans[i].input, count, halves[0], halves[1]);
  }
  HVD_TRY(run_sum(plane, sum));
  operation.outputs.resize(operation.spans.size());
  for (size_t i = 0; i < operation.spans.size(); ++i) {
    const OutputBuffer& first = sum.outputs[i * arrays];
    const OutputBuffer& second = sum.outputs[i * arrays + arrays - 1];
    HVD_TRY(make_rows(operation, i, first.shape[0]));
    wide.narrow(reinterpret_cast<const int64_t*>(first.data.get()), reinterpret_cast<const int64_t*>(second.data.get()),
                static_cast<int64_t>(first.bytes / sizeof(int64_t)), operation.outputs[i].data.get());
  }
  return {};
}

}  // namespace

Status average_integers(const DataPlane& plane, Batch batch) {
  const Wide wide(batch[0]->spec, size_of(plane));
  if (batch[0]->spec.type == OpType::allreduce) return allreduce(plane, batch, wide);
  for (Operation* operation : batch) HVD_TRY(reducescatter(plane, *operation, wide));
  return {};
}

}  // namespace horovod
