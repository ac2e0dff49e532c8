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
  std::string what;  // the batch, for messages

  int rank() const { return peers.rank; }
  int size() const { return peers.size(); }
  // Result memory on the device.
  Status allocate(Operation& operation, size_t tensor, int64_t rows) const {
    return pipeline.up()->device().allocate_rows(operation, tensor, rows, pipeline.up());
  }
};

Status allreduce(Run& run, Batch batch);      // by elements, each dtype of a group by itself
Status adasum(Run& run, Batch batch);         // whole tensors: their dot products decide
Status broadcast(Run& run, Batch batch);      // by bytes
Status allgather(Run& run, Batch batch);      // row counts; as many bytes of each member in a chunk
Status alltoall(Run& run, Batch batch);       // row counts; as many bytes of each pair in a chunk
Status reducescatter(Run& run, Batch batch);  // as many elements of each member's rows in a chunk

}  // namespace horovod::staging
