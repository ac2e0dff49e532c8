// 32-byte vectors and F16C. Compiled with the flags that kernels.cmake sets; without them (another CPU, another
// compiler) the table is absent.
#include "kernels/table.h"

#if defined(__AVX2__) && defined(__F16C__)

#include <immintrin.h>

namespace horovod::kernels {
namespace {
constexpr size_t kVectorBytes = 32;
}
}  // namespace horovod::kernels

#include "kernels/vector.h"

namespace horovod::kernels {
namespace {

HVD_INLINE Words widen_words(const char* memory) { return (Words)_mm256_cvtepu16_epi32(load<__m128i>(memory)); }

HVD_INLINE Doubles widen_floats(const char* memory) { return _mm256_cvtps_pd(load<__m128>(memory)); }

HVD_INLINE Floats widen_halves(const char* memory) { return _mm256_cvtph_ps(load<__m128i>(memory)); }

HVD_INLINE FloatPair load_halves(const char* memory) {
  return {widen_halves(memory), widen_halves(memory + kVectorBytes / 2)};
}

HVD_INLINE void store_halves(char* memory, FloatPair pair) {
  store(memory, _mm256_cvtps_ph(canonical(pair.low), _MM_FROUND_TO_NEAREST_INT));
  store(memory + 16, _mm256_cvtps_ph(canonical(pair.high), _MM_FROUND_TO_NEAREST_INT));
}

HVD_INLINE Shorts alternate(Shorts low, Shorts high) {
  return (Shorts)_mm256_blend_epi16((__m256i)low, (__m256i)high, 0xaa);
}

HVD_INLINE Shorts subtract_saturating(Shorts left, Shorts right) {
  return (Shorts)_mm256_subs_epu16((__m256i)left, (__m256i)right);
}

}  // namespace
}  // namespace horovod::kernels

#include "kernels/loops.h"

namespace horovod::kernels {
namespace {
constexpr Table kTable = make_table("avx2");
}
const Table* const kAvx2Table = &kTable;
}  // namespace horovod::kernels

#else

namespace horovod::kernels {
const Table* const kAvx2Table = nullptr;
}

#endif
