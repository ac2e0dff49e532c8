// Adasum: a sum that shortens gradients which point the same way (Maleki et al., "Scaling Distributed Training with
// Adaptive Summation", MLSys 2021). For two gradients
//     adasum(a, b) = (1 - a.b / (2 a.a)) a + (1 - a.b / (2 b.b)) b
// and for more of them pairwise, as a binary tree over the ranks. Each tensor has coefficients of its own.
#pragma once

#include "collectives/batch.h"
#include "collectives/data_plane.h"

namespace horovod {

// Vector halving, distance doubling: at distance d each rank swaps half of what it holds with rank ^ d and combines the
// other half, so after log2(n) steps it holds 1/n of the result, which is then gathered. Ranks beyond the largest power
// of two are combined into their partner first. A rank sends about 2 B (n-1)/n bytes. Deterministic: the tree is fixed.
// Where the plane names some members, "rank" here means a place among those members.
Status adasum(const DataPlane& plane, Batch batch);

}  // namespace horovod
