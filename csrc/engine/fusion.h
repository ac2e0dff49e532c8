// Decides which operations run together as one batch. Pure, and a function only of what all members have agreed on, as
// every member must get the same answer.
#pragma once

#include <cstddef>
#include <functional>

#include "collectives/op_spec.h"

namespace horovod {

// The operation at a place of the order log, or null where it is unknown.
using SpecAt = std::function<const OpSpec*(size_t index)>;

// How many of the `count` leading operations make one batch of up to `most_bytes`; at least 1.
size_t fused_count(size_t count, const SpecAt& spec_at, size_t most_bytes);

}  // namespace horovod
