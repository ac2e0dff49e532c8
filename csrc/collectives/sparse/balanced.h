// Sums in the order of an allreduce over a sparse mesh, as a plain function. Small operations are computed with it, and
// the algorithms over the mesh (tree.h) are tested against it.
//
// Within a host the inputs are reduced in rank order and rounded to the dtype. Then the hosts are: with p the largest
// power of two up to their number, host p + i is first folded into host i; then the hosts whose numbers differ by
// d = 1, 2, 4, ..., p / 2 are combined, the lower one first. Each of these reductions is of two inputs and rounded to
// the dtype, the last one after it was postscaled. It is the order of recursive doubling and halving, in which a member
// exchanges elements with log2 p others; its error grows with log2 of the hosts and not with their number.
#pragma once

#include <cstddef>
#include <cstdint>

#include "collectives/batch.h"

namespace horovod::sparse {

// Reduces the hosts' elements to `output` in the order above. inputs: by host, already prescaled and reduced within the
// host. output may be the memory of any one of the inputs.
void reduce_balanced(const Reduction& reduction, std::byte* output, const void* const* inputs, int hosts,
                     int64_t count);

}  // namespace horovod::sparse
