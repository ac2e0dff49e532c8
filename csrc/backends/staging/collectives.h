// The engine's collectives on tensors of a device, by way of the CPU's data plane: each chunk of a batch is an
// operation of its own there, on page-locked memory. All members cut alike: chunks depend on what they have agreed on,
// and on row counts that they tell each other first.
#pragma once

#include "backends/staging/pipeline.h"
#include "collectives/batch.h"
#include "collectives/data_plane.h"

namespace horovod::staging {

struct Run {
  Pipeline& pipeline;
  const DataPlane& plane;  // the CPU's
  const cuda::Peers& peers;
  std::string what;  // names the batch in messages

  int rank() const { return peers.rank; }
  int size() const { return peers.size(); }
  // Allocates memory on the device for a result.
  Status allocate(Operation& operation, size_t tensor, int64_t rows) const {
    return pipeline.up()->device().allocate_rows(operation, tensor, rows, pipeline.up());
  }
};

Status allreduce(Run& run, Batch batch);      // cut by elements, each dtype of a group by itself
Status adasum(Run& run, Batch batch);         // whole tensors, because their dot products decide
Status broadcast(Run& run, Batch batch);      // by bytes
Status allgather(Run& run, Batch batch);      // row counts first; a chunk has equally many bytes of each member
Status alltoall(Run& run, Batch batch);       // row counts first; a chunk has equally many bytes of each pair
Status reducescatter(Run& run, Batch batch);  // a chunk has equally many elements of each member's rows

}  // namespace horovod::staging
