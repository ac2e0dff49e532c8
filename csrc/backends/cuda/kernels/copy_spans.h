// The parameters of the kernel in copy_spans.cu. Both the host's compiler and the device's read this file, the latter
// at run time (backends/cuda/compiler.h), so it includes nothing.
#pragma once

namespace horovod::cuda {

constexpr unsigned kTableSpans = 170;        // spans that fit into the parameters of a kernel, 4 KB
constexpr unsigned kChunkBytes = 16u << 10;  // bytes that one block copies; a multiple of every width
constexpr unsigned kBlockThreads = 256;

// Spans of any size and alignment, none of them empty. They are cut in chunks, which are numbered through.
struct SpanTable {
  unsigned long long from[kTableSpans];
  unsigned long long to[kTableSpans];
  unsigned bytes[kTableSpans];
  unsigned end[kTableSpans];  // chunks of this span and of all before it
  unsigned spans;
};
static_assert(sizeof(SpanTable) <= 4096, "a kernel takes no more");

}  // namespace horovod::cuda
