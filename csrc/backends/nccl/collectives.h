// The engine's collectives made of NCCL's. Each returns when all its calls are queued on the communicator's stream.
#pragma once

#include "backends/nccl/comm.h"
#include "backends/nccl/packing.h"
#include "collectives/batch.h"

namespace horovod::nccl {

struct Run {
  Comm& comm;
  const Peers& peers;
  // This rank's communicator of one, made when it is first needed (see reduction.h).
  const std::function<Status(std::shared_ptr<Comm>&)>& alone;
  Packing packing;

  int rank() const { return peers.rank; }
  int size() const { return peers.size(); }
  cuda::StreamHandle stream() const { return comm.stream()->handle(); }
};

Status allreduce(Run& run, Batch batch);  // one AllReduce for each tensor, in place or apart, or for many small ones
Status broadcast(Run& run, Batch batch);  // one Broadcast for each tensor, or for many small ones
Status allgather(Run& run, Batch batch);  // row counts over the CPU; AllGather, or a Broadcast from each rank
Status alltoall(Run& run, Batch batch);   // row counts over the CPU; Send and Recv between all pairs
Status reducescatter(Run& run, Batch batch);  // ReduceScatter, or where rows are uneven a Reduce to each rank

}  // namespace horovod::nccl
