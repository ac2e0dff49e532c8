// NCCL as the thing that moves GPU tensors between the members of a process set.
//
// A batch is queued and not waited for: the engine's own stream waits for each operation's ready moment, then runs one
// group of NCCL's calls over the spans (no fusion buffer), and a moment after them says that the results are there.
// Communicators are made with the first batch, on all members at the same place in the order log.
#pragma once

#include <memory>

#include "backends/cuda/device.h"
#include "backends/nccl/comm.h"
#include "collectives/backend.h"

namespace horovod {

// Null when NCCL can't be found; `status` then says why. streams: so many communicators with a stream of their own take
// turns, so that batches overlap on the device; equal on all members.
std::unique_ptr<DeviceBackend> make_nccl_backend(const std::string& nccl_file, std::shared_ptr<cuda::Device> device,
                                                 nccl::Peers peers, int streams, Status& status);

}  // namespace horovod
