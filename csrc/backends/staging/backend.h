// Tensors on a device by way of the host's memory and the CPU's data plane: where there is no NCCL, and for what it
// can't do.
//
// run() blocks the driver: until the framework's work on the tensors has ended on the device, and while the chunks of
// the batch are copied and worked on (pipeline.h). When it returns, the last copies back are queued; an event behind
// them says that the results are there. What is computed is the CPU's, bit by bit.
#pragma once

#include <memory>

#include "backends/cuda/peers.h"
#include "backends/cuda/pinned.h"
#include "collectives/backend.h"
#include "collectives/data_plane.h"

namespace horovod {

// The objects in `plane` must outlive the path. If `plane` names members, only Adasum can be run. Null if the device
// has no stream left; `status` then says why.
std::unique_ptr<DevicePath> make_staging_backend(std::shared_ptr<cuda::Device> device,
                                                 std::shared_ptr<cuda::PinnedPool> pool, DataPlane plane,
                                                 cuda::Peers peers, Status& status);

}  // namespace horovod
