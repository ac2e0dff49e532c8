// What runs a communicator's operations on GPU tensors: NCCL where all members have it and it can do what is asked,
// otherwise the host's memory (backends/staging).
//
// Which of both is a function of what the members have agreed on, because all of them must choose alike: of the
// operation's record, and of what each has and was told (see Offer), which they tell each other with the first batch.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "backends/cuda/peers.h"
#include "backends/gpu/shared_gpu.h"
#include "collectives/backend.h"
#include "collectives/data_plane.h"

namespace horovod {

struct GpuOptions {
  Config config;
  std::string scope;  // the name of the process set in messages, such as "the global process set"
  // Puts a sentence into the log, once, for a person who looks for it; worth_saying: shown to every user.
  std::function<void(bool worth_saying, std::string sentence)> note;
  // Ends the epoch for all of this process's communicators, without waiting for any of them.
  std::function<void(const Status&)> failed;
};

// The plane must outlive it. Null when the device has no streams left; `status` then says why.
std::unique_ptr<DeviceBackend> make_gpu_backend(GpuOptions options, const SharedGpu& gpu, const DataPlane& plane,
                                                cuda::Peers peers, Status& status);

}  // namespace horovod
