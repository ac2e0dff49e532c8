// NCCL as the thing that moves GPU tensors between the members of a process set.
//
// A batch is queued and not waited for: the engine's own stream waits for each operation's ready event, then runs one
// group of NCCL's calls over the spans, and an event after them says that the results are there. Only where a batch has
// many small tensors, they are copied to a buffer first and back from it afterwards (packing.h).
// Communicators are made with the first batch, on all members at the same place in the order log.
#pragma once

#include <memory>

#include "backends/cuda/copier.h"
#include "backends/nccl/comm.h"
#include "base/config.h"
#include "collectives/backend.h"

namespace horovod {

// Null when there is no stream to be had; `status` then says why. config: nccl_streams communicators with a stream of
// their own take turns, so that batches overlap on the device. copier: packs small tensors.
std::unique_ptr<DevicePath> make_nccl_backend(const nccl::Library& library, const Config& config,
                                              std::shared_ptr<cuda::Device> device, nccl::Peers peers,
                                              std::shared_ptr<cuda::Copier> copier, Status& status);

}  // namespace horovod
