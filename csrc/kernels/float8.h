// Eight-bit floats (Micikevicius et al., "FP8 Formats for Deep Learning", 2022): e4m3fn has no infinity and one NaN of
// either sign, e5m2 is the upper half of a float16. Computed in float32 and rounded once, to nearest even, like
// float16; what is too large becomes the largest number of e4m3fn and infinity of e5m2, as PyTorch and CUDA convert.
// Scalar, because speed matters little here: GPUs that have these types reduce them by NCCL.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/vector.h"

namespace horovod::kernels {
namespace {

template <int kFraction, int kBias, bool kHasInfinity>
struct Float8 {
  using Element = uint8_t;
  static constexpr int kNan = 0x7f - (kHasInfinity ? 1 : 0);  // canonical: 0x7f, or 0x7e beside three others
  static constexpr int kTop = kHasInfinity ? 0x7c : 0x7f;     // the first magnitude that is no number

  static HVD_INLINE float bits(uint32_t word) {
    float value;
    __builtin_memcpy(&value, &word, sizeof value);
    return value;
  }
  static HVD_INLINE uint32_t word_of(float value) {
    uint32_t word;
    __builtin_memcpy(&word, &value, sizeof word);
    return word;
  }

  static HVD_INLINE float widen(uint8_t byte) {
    const uint32_t magnitude = byte & 0x7fu, sign = (byte & 0x80u) << 24;
    if (magnitude >= static_cast<uint32_t>(kTop)) {
      return kHasInfinity && magnitude == static_cast<uint32_t>(kTop) ? bits(sign | 0x7f800000u) : bits(0x7fc00000u);
    }
    const float value = magnitude < 1u << kFraction
                            ? static_cast<float>(magnitude) * bits((127u + 1 - kBias - kFraction) << 23)
                            : bits((magnitude << (23 - kFraction)) + ((127u - kBias) << 23));
    return bits(word_of(value) | sign);
  }

  static HVD_INLINE uint8_t narrow(float value) {
    const uint32_t word = word_of(value);
    const uint32_t magnitude = word & 0x7fffffffu;
    const auto sign = static_cast<uint8_t>(word >> 24 & 0x80u);
    if (magnitude > 0x7f800000u) return kNan;
    // The smallest normal float8, as bits of a float32.
    constexpr uint32_t normal = static_cast<uint32_t>(127 + 1 - kBias) << 23;
    uint32_t rounded;
    if (magnitude < normal) {
      // Adding this lines the last bit of a float32 up with that of a denormal, rounding on the way.
      constexpr uint32_t aligner = static_cast<uint32_t>(127 + 1 - kBias + 23 - kFraction) << 23;
      rounded = word_of(bits(magnitude) + bits(aligner)) - aligner;
    } else {
      constexpr int drop = 23 - kFraction;
      const uint32_t rebased = magnitude - (static_cast<uint32_t>(127 - kBias) << 23);
      rounded = (rebased + (1u << (drop - 1)) - 1 + (rebased >> drop & 1)) >> drop;
    }
    if (rounded >= static_cast<uint32_t>(kTop)) rounded = kHasInfinity ? kTop : kTop - 1;
    return static_cast<uint8_t>(rounded) | sign;
  }
};

using Float8E4m3 = Float8<3, 7, false>;
using Float8E5m2 = Float8<2, 15, true>;

template <class Op>
HVD_INLINE float combine8(float left, float right) {
  if constexpr (Op::kOrdered) {
    if (left != left) return left;
    if (right != right) return right;
    // -0 < +0, as for the 16-bit types
    const bool less = left == right ? __builtin_signbit(left) && !__builtin_signbit(right) : left < right;
    return Op::kSmallestWins == less ? left : right;
  } else {
    return Op::apply(left, right);
  }
}

template <class F, class Op>
void reduce_float8(void* output, const void* const* inputs, int input_count, size_t count, double postscale) {
  auto* const out = static_cast<uint8_t*>(output);
  const auto factor = static_cast<float>(postscale);
  for (size_t i = 0; i < count; ++i) {
    float value = F::widen(static_cast<const uint8_t*>(inputs[0])[i]);
    for (int k = 1; k < input_count; ++k) {
      value = combine8<Op>(value, F::widen(static_cast<const uint8_t*>(inputs[k])[i]));
    }
    out[i] = F::narrow(postscale == 1.0 ? value : value * factor);
  }
}

template <class F>
void scale_float8(void* output, const void* input, size_t count, double factor) {
  auto* const out = static_cast<uint8_t*>(output);
  const auto* const in = static_cast<const uint8_t*>(input);
  for (size_t i = 0; i < count; ++i) out[i] = F::narrow(F::widen(in[i]) * static_cast<float>(factor));
}

}  // namespace
}  // namespace horovod::kernels
