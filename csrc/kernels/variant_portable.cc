// The variant for every CPU: 16-byte vectors, which compilers map to SSE2 and NEON, or to plain registers.
#include <cstddef>

namespace horovod::kernels {
namespace {
constexpr size_t kVectorBytes = 16;
}
}  // namespace horovod::kernels

#include "kernels/fallbacks.h"
#include "kernels/loops.h"

namespace horovod::kernels {
namespace {
constexpr Table kTable = make_table("portable");
}
const Table* const kPortableTable = &kTable;
}  // namespace horovod::kernels
