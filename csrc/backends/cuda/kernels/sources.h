// The text of the kernel, as it lies beside this file; kernels.cmake puts it into the engine.
#pragma once

namespace horovod::cuda {

extern const char kCopySpansSource[];
extern const char kCopySpansHeader[];
inline constexpr const char* kCopySpansHeaderName = "backends/cuda/kernels/copy_spans.h";  // as the source includes it

}  // namespace horovod::cuda
