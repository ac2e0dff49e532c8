// Collectives over stream sockets, one file each. A call runs one batch on this rank; every rank of the mesh calls the
// same function with a matching batch. All of them are deterministic: an element is reduced in rank order, whatever its
// position.
#pragma once

#include "collectives/batch.h"
#include "transport/mesh.h"

namespace horovod::mesh {

Status allreduce(Mesh& mesh, Batch batch);  // spans in and out of equal count on every rank
Status broadcast(Mesh& mesh,
                 Batch batch);  // spec.root is an index into the mesh; the root's output may equal its input
Status allgather(Mesh& mesh, Batch batch);  // rows may differ by rank; fills Operation::outputs with all ranks' rows
Status alltoall(Mesh& mesh, Batch batch);   // splits by row; fills outputs and received_splits
Status reducescatter(Mesh& mesh, Batch batch);  // split_rows; fills outputs with this rank's rows

}  // namespace horovod::mesh
