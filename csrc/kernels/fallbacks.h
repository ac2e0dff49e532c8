// What a variant defines for its own instruction set, in the portable form: float16 by integer arithmetic, and a few
// moves of lanes. Two halves share a 32-bit word, so that most of it moves no lane at all.
#pragma once

#include "kernels/vector.h"

namespace horovod::kernels {
namespace {

// Half a vector's bytes of smaller elements, in their order in memory, as a whole vector of larger ones.
HVD_INLINE Words widen_words(const char* memory) {
  typedef uint16_t Half __attribute__((vector_size(kVectorBytes / 2)));
  return __builtin_convertvector(load<Half>(memory), Words);
}
HVD_INLINE Doubles widen_floats(const char* memory) {
  typedef float Half __attribute__((vector_size(kVectorBytes / 2)));
  return __builtin_convertvector(load<Half>(memory), Doubles);
}

// `half` in the lower 16 bits, zeros above.
HVD_INLINE Floats from_half(Words half) {
  constexpr uint32_t rebias = (127 - 15) << 23;
  constexpr uint32_t exponent = 0x1fu << 23;
  const Words magnitude = (half & 0x7fffu) << 13;
  const Words normal = magnitude + rebias;
  const Words special = normal + rebias;  // infinity and NaN: the largest exponent stays the largest
  // A denormal half is read as the fraction of 2^-14 (1 + fraction), from which the 2^-14 is taken off again, exactly.
  const Floats smallest = (Floats)(Words{} + (113u << 23));
  const Words denormal = (Words)((Floats)(magnitude + (113u << 23)) - smallest);
  const Words bits = (magnitude & exponent) == exponent ? special : (magnitude & exponent) == 0 ? denormal : normal;
  return (Floats)(bits | (half & 0x8000u) << 16);
}

// Rounds to nearest even. The upper 16 bits of the answer are zeros.
HVD_INLINE Words to_half(Floats value) {
  using Integers = Vector<int32_t>;  // magnitudes are positive, and SSE2 compares only signed integers
  const Integers magnitude = (Integers)value & 0x7fffffff;
  // Values under 2^-14: adding 0.5 lines the last bit of a float32 up with that of a denormal half, rounding on the
  // way.
  const Floats one_half = (Floats)(Integers{} + (126 << 23));
  const Integers denormal = (Integers)((Floats)magnitude + one_half) - (126 << 23);
  const Integers normal = (magnitude - ((127 - 15) << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  const Integers finite = magnitude < (113 << 23) ? denormal : normal;
  const Integers bounded = magnitude < (143 << 23) ? finite : Integers{} + 0x7c00;
  const Integers with_sign = bounded | (((Integers)value >> 16) & 0x8000);
  return (Words)(magnitude > 0x7f800000 ? Integers{} + 0x7e00 : with_sign);
}

// Float16 to float32, in their order in memory.
HVD_INLINE Floats widen_halves(const char* memory) { return from_half(widen_words(memory)); }

// A whole vector of float16. Which of them go to low and which to high is the variant's choice, if store_halves() makes
// the same one.
HVD_INLINE FloatPair load_halves(const char* memory) {
  const Words both = load<Words>(memory);
  return {from_half(both & 0xffffu), from_half(both >> 16)};
}

// Stores both vectors as float16, rounded to nearest even; NaNs become canonical.
HVD_INLINE void store_halves(char* memory, FloatPair pair) {
  store(memory, to_half(pair.low) | to_half(pair.high) << 16);
}

// The lower half of each 32-bit word from `low`, the upper half from `high`.
HVD_INLINE Shorts alternate(Shorts low, Shorts high) {
  return (Shorts)(((Words)low & 0xffffu) | ((Words)high & 0xffff0000u));
}

// left - right, or 0 if that is negative.
HVD_INLINE Shorts subtract_saturating(Shorts left, Shorts right) { return left - (left < right ? left : right); }

}  // namespace
}  // namespace horovod::kernels
