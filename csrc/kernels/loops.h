// The loops over memory and the table of them: what a variant_*.cc consists of once it has chosen its vectors.
#pragma once

#include <type_traits>

#include "kernels/adasum_loops.h"
#include "kernels/float8.h"
#include "kernels/formats.h"
#include "kernels/reductions.h"
#include "kernels/table.h"

namespace horovod::kernels {
namespace {

constexpr int kUnroll = 4;
constexpr size_t kAlignFromBytes = 1024;  // below this, an aligned output saves less than it costs

// Several packs at a time keep the adders busy and spread the cost of walking the inputs.
template <class F, class Op, int kPacks>
HVD_INLINE void reduce_packs(typename F::Pack (&packs)[kPacks], const char* const* inputs, int input_count,
                             size_t offset) {
#pragma GCC unroll 8
  for (int p = 0; p < kPacks; ++p) packs[p] = F::read(inputs[0] + offset + p * kVectorBytes);
  for (int k = 1; k < input_count; ++k) {
    const char* const input = inputs[k] + offset;
#pragma GCC unroll 8
    for (int p = 0; p < kPacks; ++p) packs[p] = combine<Op>(packs[p], F::read(input + p * kVectorBytes));
  }
}

template <class F, bool kScaled, int kPacks>
HVD_INLINE void write_packs(char* output, typename F::Pack (&packs)[kPacks], [[maybe_unused]] double factor) {
#pragma GCC unroll 8
  for (int p = 0; p < kPacks; ++p) {
    if constexpr (kScaled) packs[p] = F::multiply(packs[p], static_cast<typename F::Factor>(factor));
    F::write(output + p * kVectorBytes, packs[p]);
  }
}

// One vector at `offset`, or the `bytes` < kVectorBytes that are there, into `output`.
template <class F, class Op, bool kScaled>
__attribute__((noinline)) void reduce_edge(char* output, const char* const* inputs, int input_count, size_t offset,
                                           size_t bytes, double factor) {
  typename F::Pack packs[1];
  if (bytes >= kVectorBytes) [[likely]] {
    reduce_packs<F, Op>(packs, inputs, input_count, offset);
    return write_packs<F, kScaled>(output, packs, factor);
  }
  alignas(kVectorBytes) char buffer[kVectorBytes] = {};  // zeros after the last element
  copy_few(buffer, inputs[0] + offset, bytes);
  packs[0] = F::read(buffer);
  for (int k = 1; k < input_count; ++k) {
    copy_few(buffer, inputs[k] + offset, bytes);
    packs[0] = combine<Op>(packs[0], F::read(buffer));
  }
  write_packs<F, kScaled>(buffer, packs, factor);
  copy_few(output, buffer, bytes);
}

// The middle runs over whole vectors with an aligned output. What sticks out on either side is done by one vector that
// overlaps the middle: computed before the middle is written (output may be an input), stored after it, with equal
// values.
template <class F, class Op, bool kScaled>
HVD_INLINE void reduce_bytes(char* output, const char* const* inputs, int input_count, size_t bytes, double factor) {
  const auto edge = [&](char* to, size_t offset) __attribute__((always_inline)) {
    reduce_edge<F, Op, kScaled>(to, inputs, input_count, offset, bytes, factor);
  };
  if (bytes <= kVectorBytes) return bytes > 0 ? edge(output, 0) : void();

  alignas(kVectorBytes) char head[kVectorBytes];
  alignas(kVectorBytes) char tail[kVectorBytes];
  size_t offset = 0;
  if (bytes >= kAlignFromBytes) {
    offset = -reinterpret_cast<uintptr_t>(output) % kVectorBytes;
    if (offset % sizeof(typename F::Element) != 0) offset = 0;  // the elements are not aligned themselves
  }
  const bool has_head = offset != 0;
  const bool has_tail = (bytes - offset) % kVectorBytes != 0;
  if (has_head) edge(head, 0);
  if (has_tail) edge(tail, bytes - kVectorBytes);

  for (; offset + kUnroll * kVectorBytes <= bytes; offset += kUnroll * kVectorBytes) {
    typename F::Pack packs[kUnroll];
    reduce_packs<F, Op>(packs, inputs, input_count, offset);
    write_packs<F, kScaled>(output + offset, packs, factor);
  }
  for (; offset + kVectorBytes <= bytes; offset += kVectorBytes) edge(output + offset, offset);
  if (has_head) __builtin_memcpy(output, head, kVectorBytes);
  if (has_tail) __builtin_memcpy(output + bytes - kVectorBytes, tail, kVectorBytes);
}

// Two inputs are the hot path and get a loop of their own; any other number shares one.
template <class F, class Op, bool kScaled>
HVD_INLINE void reduce_any(void* output, const void* const* inputs, int input_count, size_t count, double factor) {
  const size_t bytes = count * sizeof(typename F::Element);
  if (input_count == 2) {
    const char* const pair[2] = {static_cast<const char*>(inputs[0]), static_cast<const char*>(inputs[1])};
    reduce_bytes<F, Op, kScaled>(static_cast<char*>(output), pair, 2, bytes, factor);
  } else {
    reduce_bytes<F, Op, kScaled>(static_cast<char*>(output), reinterpret_cast<const char* const*>(inputs), input_count,
                                 bytes, factor);
  }
}

template <class F, class Op>
void reduce_real(void* output, const void* const* inputs, int input_count, size_t count, double postscale) {
  if (postscale == 1.0) {
    reduce_any<F, Op, false>(output, inputs, input_count, count, 1.0);
  } else {
    reduce_any<F, Op, true>(output, inputs, input_count, count, plain(postscale));
  }
}

template <class F>
void scale_real(void* output, const void* input, size_t count, double factor) {
  const char* const inputs[1] = {static_cast<const char*>(input)};
  reduce_bytes<F, Sum, true>(static_cast<char*>(output), inputs, 1, count * sizeof(typename F::Element), plain(factor));
}

// Comparisons don't round, so a factor may as well follow in a second pass.
template <class F, class Ordered, class Op>
void reduce_ordered(void* output, const void* const* inputs, int input_count, size_t count, double postscale) {
  reduce_any<Ordered, Op, false>(output, inputs, input_count, count, 1.0);
  if (postscale != 1.0) scale_real<F>(output, output, count, postscale);
}

template <class Op, class T>
using Lane = std::conditional_t<Op::kOrdered, T, std::make_unsigned_t<T>>;

template <class F, class Op>
void reduce_integer(void* output, const void* const* inputs, int input_count, size_t count, double) {
  reduce_any<F, Op, false>(output, inputs, input_count, count, 1.0);
}

// Truncates toward zero; what does not fit becomes the nearest value that does, and NaN becomes 0. `Through` is int32_t
// wherever that holds T, because every vector unit converts to it. No branches, so that the loop below vectorises.
template <class T, class Through>
HVD_INLINE T to_integer(double value) {
  constexpr bool is_signed = static_cast<T>(-1) < static_cast<T>(0);
  constexpr uint64_t half = uint64_t{1} << (sizeof(T) * 8 - is_signed - 1);
  constexpr double limit = 2.0 * static_cast<double>(half);  // one past the largest
  constexpr double lowest = is_signed ? -limit : 0.0;
  const double number = value == value ? value : 0.0;
  const double above = number > lowest ? number : lowest;
  const Through within = static_cast<Through>(above < limit ? above : 0.0);
  return above < limit ? static_cast<T>(within) : static_cast<T>(half - 1 + half);
}

template <class T, class Through>
void scale_integer(void* output, const void* input, size_t count, double factor) {
  typedef T Unaligned __attribute__((aligned(1), may_alias));
  Unaligned* const out = static_cast<Unaligned*>(output);
  const Unaligned* const in = static_cast<const Unaligned*>(input);
  HVD_INDEPENDENT
  for (size_t i = 0; i < count; ++i) out[i] = to_integer<T, Through>(static_cast<double>(in[i]) * factor);
}

// -- the table ------------------------------------------------------------------------------------------------------

// One reduction for every dtype; null where it has no meaning, which check_reduction() refuses.
template <class Op>
constexpr void add_reduction(Table& table, ReduceOp op) {
  const auto set = [&table, op](DType dtype, ReduceFunction function) {
    table.reduce[static_cast<int>(dtype)][static_cast<int>(op)] = function;
  };
  set(DType::uint8, reduce_integer<Integer<Lane<Op, uint8_t>>, Op>);
  set(DType::int8, reduce_integer<Integer<Lane<Op, int8_t>>, Op>);
  set(DType::int16, reduce_integer<Integer<Lane<Op, int16_t>>, Op>);
  set(DType::uint16, reduce_integer<Integer<Lane<Op, uint16_t>>, Op>);
  set(DType::int32, reduce_integer<Integer<Lane<Op, int32_t>>, Op>);
  set(DType::uint32, reduce_integer<Integer<Lane<Op, uint32_t>>, Op>);
  set(DType::int64, reduce_integer<Integer<Lane<Op, int64_t>>, Op>);
  set(DType::uint64, reduce_integer<Integer<Lane<Op, uint64_t>>, Op>);
  set(DType::boolean, reduce_integer<Boolean, typename Op::OnTruth>);
  if constexpr (Op::kFloats) {
    if constexpr (Op::kOrdered) {
      set(DType::float16, reduce_ordered<Float16, Ordered16<0x7c00, 0x7e00, Op::kSmallestWins>, Op>);
      set(DType::bfloat16, reduce_ordered<Bfloat16, Ordered16<0x7f80, 0x7fc0, Op::kSmallestWins>, Op>);
    } else {
      set(DType::float16, reduce_real<Float16, Op>);
      set(DType::bfloat16, reduce_real<Bfloat16, Op>);
    }
    set(DType::float32, reduce_real<Real<float>, Op>);
    set(DType::float64, reduce_real<Real<double>, Op>);
    set(DType::float8_e4m3fn, reduce_float8<Float8E4m3, Op>);
    set(DType::float8_e5m2, reduce_float8<Float8E5m2, Op>);
  }
}

template <class F>
constexpr void add_real(Table& table, DType dtype) {
  table.scale[static_cast<int>(dtype)] = scale_real<F>;
  table.dot_products[static_cast<int>(dtype)] = dot_products<F>;
  table.weighted_sum[static_cast<int>(dtype)] = weighted_sum<F>;
}

constexpr Table make_table(const char* isa) {
  Table table;
  table.isa = isa;
  for_each_reduction([&table](ReduceOp op, auto functor) { add_reduction<decltype(functor)>(table, op); });
  const auto set_scale = [&table](DType dtype, ScaleFunction scale) { table.scale[static_cast<int>(dtype)] = scale; };
  set_scale(DType::uint8, scale_integer<uint8_t, int32_t>);
  set_scale(DType::int8, scale_integer<int8_t, int32_t>);
  set_scale(DType::int16, scale_integer<int16_t, int32_t>);
  set_scale(DType::uint16, scale_integer<uint16_t, int32_t>);
  set_scale(DType::int32, scale_integer<int32_t, int32_t>);
  set_scale(DType::uint32, scale_integer<uint32_t, int64_t>);
  set_scale(DType::int64, scale_integer<int64_t, int64_t>);
  set_scale(DType::uint64, scale_integer<uint64_t, uint64_t>);
  set_scale(DType::float8_e4m3fn, scale_float8<Float8E4m3>);
  set_scale(DType::float8_e5m2, scale_float8<Float8E5m2>);
  add_real<Float16>(table, DType::float16);
  add_real<Bfloat16>(table, DType::bfloat16);
  add_real<Real<float>>(table, DType::float32);
  add_real<Real<double>>(table, DType::float64);
  return table;
}

}  // namespace
}  // namespace horovod::kernels
