// The reduction over a mesh that allreduce and reducescatter use.
#pragma once

#include <span>

#include "collectives/batch.h"
#include "collectives/hosts.h"
#include "transport/mesh.h"

namespace horovod::mesh {

// Elements [begin, end) of a virtual array: what one member reduces.
struct Slice {
  const SpanList* list = nullptr;
  int64_t begin = 0;
  int64_t end = 0;

  int64_t size() const { return end - begin; }
};

enum class Flow {
  scatter,         // slices are disjoint, each member keeps its own
  scatter_gather,  // slices are disjoint, and every member sends its reduced slice to all
  replicate,       // every slice is the whole array: all members reduce everything
};

// slices[j] is what member j reduces, in this member's own memory; sizes agree on all members. Every element is reduced
// in the order of the ranks, wherever it lies, so the bits depend on nothing but the inputs.
//
// Each slice goes straight to its reducer, in chunks: while one chunk is reduced the next ones are on the wire, and
// reduced chunks leave at once. Each member sends and receives (n - 1) / n of the array for scatter, twice that with
// the gather. Scratch memory is bounded and independent of the array's size.
//
// hosts: where members share memory, elements are reduced in the order of the hosts instead.
Status reduce_slices(Mesh& mesh, std::span<const Slice> slices, const Reduction& reduction, Flow flow,
                     const Hosts* hosts = nullptr);

}  // namespace horovod::mesh
