// How each element type lies in memory and what it is while we compute with it.
//
// A format reads kVectorBytes bytes of memory as one Pack, writes a Pack back (the only place where it rounds), and can
// (if it is a real type) multiply a Pack by a factor.
#pragma once

#include "kernels/vector.h"

namespace horovod::kernels {
namespace {

template <class T>
struct Integer {
  using Element = T;
  using Pack = Vector<T>;
  static HVD_INLINE Pack read(const char* memory) { return load<Pack>(memory); }
  static HVD_INLINE void write(char* memory, Pack pack) { store(memory, pack); }
};

// Any byte but 0 is true on the way in; only 0 and 1 go out.
struct Boolean : Integer<uint8_t> {
  static HVD_INLINE void write(char* memory, Pack pack) { store(memory, pack != 0 ? Pack{} + 1 : Pack{}); }
};

template <class T>
struct Real {
  using Element = T;
  using Factor = T;
  using Pack = Vector<T>;
  static HVD_INLINE Pack read(const char* memory) { return load<Pack>(memory); }
  static HVD_INLINE void write(char* memory, Pack pack) { store(memory, canonical(pack)); }
  static HVD_INLINE Pack multiply(Pack pack, Factor factor) { return pack * factor; }
};

struct Float16 {
  using Element = uint16_t;
  using Factor = float;
  using Pack = FloatPair;
  static HVD_INLINE Pack read(const char* memory) { return load_halves(memory); }
  static HVD_INLINE Floats widen(const char* memory) { return widen_halves(memory); }
  static HVD_INLINE void write(char* memory, Pack pack) { store_halves(memory, pack); }
  static HVD_INLINE Pack multiply(Pack pack, Factor factor) { return {pack.low * factor, pack.high * factor}; }
};

// bfloat16 is the upper half of a float32, so a 32-bit word holds two of them one shift apart: no lane has to move.
// (The conversion instructions of AVX512_BF16 flush denormals, therefore not those.)
struct Bfloat16 {
  using Element = uint16_t;
  using Factor = float;
  using Pack = FloatPair;

  static HVD_INLINE Pack read(const char* memory) {
    const Words both = load<Words>(memory);
    return {(Floats)(both << 16), (Floats)(both & 0xffff0000u)};
  }

  static HVD_INLINE Floats widen(const char* memory) { return (Floats)(widen_words(memory) << 16); }

  // All arithmetic is done on 16-bit lanes, on both vectors at once. To nearest even: up when the lower half is above
  // 0x8000, or equal to it and the upper half is odd. A NaN here has a lower half of zeros, because its payload came
  // from a bfloat16, and so it stays one until the last line replaces it.
  static HVD_INLINE void write(char* memory, Pack pack) {
    const Words low = (Words)pack.low, high = (Words)pack.high;
    const Shorts upper = alternate((Shorts)(low >> 16), (Shorts)high);
    const Shorts lower = alternate((Shorts)low, (Shorts)(high << 16));
    const Shorts rounded = upper + (subtract_saturating(lower, ~upper & 1) >> 15);
    store(memory, (Vector<int16_t>)(rounded & 0x7fff) > 0x7f80 ? Shorts{} + 0x7fc0 : rounded);
  }

  static HVD_INLINE Pack multiply(Pack pack, Factor factor) { return {pack.low * factor, pack.high * factor}; }
};

// 16-bit floats that are only compared: as integers of the same order, without any conversion. NaN is the one integer
// that wins the comparison, so that it stays.
template <int16_t kInfinity, int16_t kNan, bool kSmallestWins>
struct Ordered16 {
  using Element = uint16_t;
  using Pack = Vector<int16_t>;
  static constexpr int16_t kMinusInfinity = static_cast<int16_t>(~kInfinity);
  static constexpr int16_t kWinner = kSmallestWins ? INT16_MIN : INT16_MAX;

  // Flips the magnitude bits of negative numbers; its own inverse.
  static HVD_INLINE Pack flip(Pack bits) { return bits ^ ((bits >> 15) & 0x7fff); }

  static HVD_INLINE Pack read(const char* memory) {
    const Pack key = flip(load<Pack>(memory));
    return (kSmallestWins ? key > kInfinity : key < kMinusInfinity) ? Pack{} + kWinner : key;
  }
  static HVD_INLINE void write(char* memory, Pack key) {
    const Pack is_nan = kSmallestWins ? key < kMinusInfinity : key > kInfinity;
    store(memory, is_nan ? Pack{} + kNan : flip(key));
  }
};

// The factor without a NaN's payload, which must not travel into results (see Bfloat16::write).
HVD_INLINE double plain(double factor) { return factor == factor ? factor : __builtin_nan(""); }

}  // namespace
}  // namespace horovod::kernels
