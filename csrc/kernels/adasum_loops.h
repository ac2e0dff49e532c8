// The loops behind adasum.h.
#pragma once

#include "kernels/adasum.h"
#include "kernels/formats.h"
#include "kernels/reductions.h"

namespace horovod::kernels {
namespace {

constexpr size_t kSums = 16;
constexpr size_t kLanes = kVectorBytes / sizeof(double);
constexpr size_t kBlock = 512;  // elements of 16 bits that are widened at a time, to stay in the first-level cache

// As many elements as a vector has doubles.
HVD_INLINE Doubles load_as_doubles(const double* memory) { return load<Doubles>((const char*)memory); }
HVD_INLINE Doubles load_as_doubles(const float* memory) { return widen_floats((const char*)memory); }

// Sixteen running sums in every variant, however wide its vectors are, so that all add in the same order.
struct RunningSums {
  Doubles ab[kSums / kLanes] = {}, aa[kSums / kLanes] = {}, bb[kSums / kLanes] = {};

  template <class T>
  HVD_INLINE void add(const T* a, const T* b) {
#pragma GCC unroll 8
    for (size_t v = 0; v < kSums / kLanes; ++v) {
      const Doubles left = load_as_doubles(a + v * kLanes), right = load_as_doubles(b + v * kLanes);
      ab[v] += left * right;
      aa[v] += left * left;
      bb[v] += right * right;
    }
  }

  // What is left over is padded with zeros, which change no sum.
  template <class T>
  HVD_INLINE void add_all(const T* a, const T* b, size_t count) {
    size_t i = 0;
    for (; i + kSums <= count; i += kSums) add(a + i, b + i);
    if (i == count) return;
    T last_a[kSums] = {}, last_b[kSums] = {};
    __builtin_memcpy(last_a, a + i, (count - i) * sizeof(T));
    __builtin_memcpy(last_b, b + i, (count - i) * sizeof(T));
    add(last_a, last_b);
  }

  static HVD_INLINE double total(const Doubles* sums) {
    double values[kSums];
    __builtin_memcpy(values, sums, sizeof values);
    for (size_t half = kSums / 2; half > 0; half /= 2) {
      for (size_t i = 0; i < half; ++i) values[i] += values[i + half];
    }
    return plain(values[0]);
  }
};

// Unaligned pointers are only ever handed to memcpy.
template <class T>
HVD_INLINE void add_to(RunningSums& sums, Real<T>, const char* a, const char* b, size_t count) {
  sums.add_all((const T*)a, (const T*)b, count);
}

template <class F>
HVD_INLINE void widen_all(const char* memory, float* floats, size_t count) {
  constexpr size_t step = kVectorBytes / sizeof(float);
  size_t i = 0;
  for (; i + step <= count; i += step) store((char*)(floats + i), F::widen(memory + 2 * i));
  if (i == count) return;
  char last[kVectorBytes / 2] = {};
  __builtin_memcpy(last, memory + 2 * i, 2 * (count - i));
  const Floats widened = F::widen(last);
  __builtin_memcpy(floats + i, &widened, 4 * (count - i));
}

template <class F>
HVD_INLINE void add_to(RunningSums& sums, F, const char* a, const char* b, size_t count) {
  float wide_a[kBlock], wide_b[kBlock];
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t part = count - begin < kBlock ? count - begin : kBlock;
    widen_all<F>(a + 2 * begin, wide_a, part);
    widen_all<F>(b + 2 * begin, wide_b, part);
    sums.add_all(wide_a, wide_b, part);
  }
}

template <class F>
DotProducts dot_products(const void* a, const void* b, size_t count) {
  RunningSums sums;
  add_to(sums, F{}, static_cast<const char*>(a), static_cast<const char*>(b), count);
  return {RunningSums::total(sums.ab), RunningSums::total(sums.aa), RunningSums::total(sums.bb)};
}

template <class F>
HVD_INLINE typename F::Pack weigh(const char* a, double x, const char* b, double y) {
  using Factor = typename F::Factor;
  return combine<Sum>(F::multiply(F::read(a), static_cast<Factor>(x)), F::multiply(F::read(b), static_cast<Factor>(y)));
}

template <class F>
void weighted_sum(void* output, const void* a, double x, const void* b, double y, size_t count) {
  const size_t bytes = count * sizeof(typename F::Element);
  char* const out = static_cast<char*>(output);
  const char* const left = static_cast<const char*>(a);
  const char* const right = static_cast<const char*>(b);
  x = plain(x);
  y = plain(y);
  size_t offset = 0;
  for (; offset + kVectorBytes <= bytes; offset += kVectorBytes) {
    F::write(out + offset, weigh<F>(left + offset, x, right + offset, y));
  }
  if (offset == bytes) return;
  char last_a[kVectorBytes] = {}, last_b[kVectorBytes] = {};
  copy_few(last_a, left + offset, bytes - offset);
  copy_few(last_b, right + offset, bytes - offset);
  F::write(last_a, weigh<F>(last_a, x, last_b, y));
  copy_few(out + offset, last_a, bytes - offset);
}

}  // namespace
}  // namespace horovod::kernels
