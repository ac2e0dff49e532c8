// Copies many spans at once: small tensors into the buffer in which they are reduced together, and out of it again. One
// block for each chunk, so that blocks have equal work however uneven the tensors are.
//
// Compiled at run time (backends/cuda/compiler.h), and as C++ by the tests' stand-in for the driver, which calls it
// thread by thread: so no thread may wait for another.
#include "backends/cuda/kernels/copy_spans.h"

namespace {

using namespace horovod::cuda;

template <typename Word>
__device__ void copy(char* to, const char* from, unsigned bytes) {
  Word* __restrict__ out = reinterpret_cast<Word*>(to);
  const Word* __restrict__ in = reinterpret_cast<const Word*>(from);
  const unsigned words = bytes / sizeof(Word);
#pragma unroll 4
  for (unsigned i = threadIdx.x; i < words; i += kBlockThreads) out[i] = in[i];
  const unsigned rest = words * sizeof(Word);
  if (threadIdx.x < bytes - rest) to[rest + threadIdx.x] = from[rest + threadIdx.x];
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kBlockThreads) horovod_copy_spans(const SpanTable table) {
  unsigned span = 0;  // the first one that ends behind this block's chunk
  for (unsigned last = table.spans - 1; span < last;) {
    const unsigned middle = (span + last) / 2;
    if (table.end[middle] > blockIdx.x) {
      last = middle;
    } else {
      span = middle + 1;
    }
  }
  const unsigned chunk = blockIdx.x - (span > 0 ? table.end[span - 1] : 0);
  const unsigned begin = chunk * kChunkBytes;
  const unsigned left = table.bytes[span] - begin;
  const unsigned bytes = left < kChunkBytes ? left : kChunkBytes;
  const unsigned long long from = table.from[span] + begin, to = table.to[span] + begin;
  char* const out = reinterpret_cast<char*>(to);
  const char* const in = reinterpret_cast<const char*>(from);
  const unsigned aligned = static_cast<unsigned>(from | to);
  if (aligned % 16 == 0) {
    copy<uint4>(out, in, bytes);
  } else if (aligned % 8 == 0) {
    copy<unsigned long long>(out, in, bytes);
  } else if (aligned % 4 == 0) {
    copy<unsigned>(out, in, bytes);
  } else if (aligned % 2 == 0) {
    copy<unsigned short>(out, in, bytes);
  } else {
    copy<char>(out, in, bytes);
  }
}
