// 64-byte vectors. Compiled with the flags that kernels.cmake sets; without them (another CPU, another compiler)
// the table is absent.
#include "kernels/table.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)

#include <immintrin.h>

namespace horovod::kernels {
namespace {
constexpr size_t kVectorBytes = 64;
}
}  // namespace horovod::kernels

#include "kernels/vector.h"

namespace horovod::kernels {
namespace {

// The zero-masking forms with a full mask are the plain instructions; the plain intrinsics of GCC 12 warn.
constexpr __mmask16 kAll = 0xffff;

HVD_INLINE Words widen_words(const char* memory) {
  return (Words)_mm512_maskz_cvtepu16_epi32(kAll, load<__m256i>(memory));
}

HVD_INLINE Doubles widen_floats(const char* memory) { return _mm512_maskz_cvtps_pd(0xff, load<__m256>(memory)); }

HVD_INLINE Floats widen_halves(const char* memory) { return _mm512_maskz_cvtph_ps(kAll, load<__m256i>(memory)); }

HVD_INLINE FloatPair load_halves(const char* memory) {
  return {widen_halves(memory), widen_halves(memory + kVectorBytes / 2)};
}

HVD_INLINE void store_halves(char* memory, FloatPair pair) {
  store(memory, _mm512_maskz_cvtps_ph(kAll, canonical(pair.low), _MM_FROUND_TO_NEAREST_INT));
  store(memory + 32, _mm512_maskz_cvtps_ph(kAll, canonical(pair.high), _MM_FROUND_TO_NEAREST_INT));
}

HVD_INLINE Shorts alternate(Shorts low, Shorts high) {
  return (Shorts)_mm512_mask_blend_epi16(0xaaaaaaaa, (__m512i)low, (__m512i)high);
}

HVD_INLINE Shorts subtract_saturating(Shorts left, Shorts right) {
  return (Shorts)_mm512_subs_epu16((__m512i)left, (__m512i)right);
}

}  // namespace
}  // namespace horovod::kernels

#include "kernels/loops.h"

namespace horovod::kernels {
namespace {
constexpr Table kTable = make_table("avx512");
}
const Table* const kAvx512Table = &kTable;
}  // namespace horovod::kernels

#else

namespace horovod::kernels {
const Table* const kAvx512Table = nullptr;
}

#endif
