// Adasum of GPU tensors where all members have NCCL: the mean of each host's members by NCCL, the Adasum of these means
// by the CPU of each host's first member, and its result by NCCL to the others of the host.
//
// So it is not what Adasum of the same tensors in the host's memory is, which combines every member with every other:
// on a fast link inside the host the members are one large batch, as in the paper that adasum.h names. On one host it
// is the mean.
#pragma once

#include <functional>
#include <memory>

#include "collectives/backend.h"
#include "collectives/hosts.h"

namespace horovod {

struct AdasumSteps {
  std::shared_ptr<DevicePath> within;   // NCCL among the members of this host, in rank order
  std::shared_ptr<DevicePath> between;  // Adasum of the first members of all hosts, through the host's memory; null on
                                        // other members, and where there is one host
};
// Called by the driver with the first batch: few scripts use Adasum, and the steps have streams of their own.
using MakeAdasumSteps = std::function<Status(AdasumSteps&)>;

std::unique_ptr<DevicePath> make_adasum_path(MakeAdasumSteps make, const Hosts& hosts);

}  // namespace horovod
