// The smallest vocabulary on which all arithmetic here is written: vectors of the width that the including variant
// chose.
//
// Included once by each variant_*.cc, after that file defined kVectorBytes. GCC and Clang turn their vector extension
// into the instructions that the file's flags allow, so one source serves every instruction set. What it can't say, or
// GCC says badly, a variant defines itself (fallbacks.h has the list, with a meaning and a portable form for each).
//
// Everything is in an unnamed namespace and calls no library code: a function compiled for AVX-512 can't replace a
// portable one at link time.
#pragma once

#include <cstddef>
#include <cstdint>

#define HVD_INLINE inline __attribute__((always_inline))

// Put before a loop: no iteration reads what another one writes.
#ifdef __clang__
#define HVD_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define HVD_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace horovod::kernels {
namespace {

template <class T>
struct VectorOf {
  typedef T type __attribute__((vector_size(kVectorBytes)));
};
template <class T>
using Vector = typename VectorOf<T>::type;

using Floats = Vector<float>;
using Doubles = Vector<double>;
using Words = Vector<uint32_t>;
using Shorts = Vector<uint16_t>;

// Two vectors of float32 from one vector of 16-bit floats.
struct FloatPair {
  Floats low, high;
};

template <class V>
HVD_INLINE V load(const char* memory) {
  V vector;
  __builtin_memcpy(&vector, memory, sizeof vector);
  return vector;
}

template <class V>
HVD_INLINE void store(char* memory, V vector) {
  __builtin_memcpy(memory, &vector, sizeof vector);
}

// Which NaN comes out of NaN + NaN depends on the order of operands in an instruction, which compilers choose freely.
// One fixed NaN keeps all variants equal to the bit.
HVD_INLINE Floats canonical(Floats value) { return value == value ? value : (Floats)(Words{} + 0x7fc00000u); }
HVD_INLINE Doubles canonical(Doubles value) {
  return value == value ? value : (Doubles)(Vector<uint64_t>{} + 0x7ff8000000000000u);
}

// Copies fewer than kVectorBytes bytes.
HVD_INLINE void copy_few(char* to, const char* from, size_t bytes) {
#pragma GCC unroll 8
  for (size_t part = kVectorBytes / 2; part > 0; part /= 2) {
    if (bytes & part) {
      __builtin_memcpy(to, from, part);
      to += part;
      from += part;
    }
  }
}

}  // namespace
}  // namespace horovod::kernels
