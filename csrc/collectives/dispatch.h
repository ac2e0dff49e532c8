// Which collective an operation's type is, for a way that has one function for each.
#pragma once

#include <type_traits>

#include "collectives/batch.h"

namespace horovod {

// Of: whatever the functions work on, as they take it.
template <typename Of>
Status dispatch(OpType type, std::type_identity_t<Of> of, Batch batch, Status (*allreduce)(Of, Batch),
                Status (*allgather)(Of, Batch), Status (*broadcast)(Of, Batch), Status (*alltoall)(Of, Batch),
                Status (*reducescatter)(Of, Batch)) {
  switch (type) {
    case OpType::allreduce:
      return allreduce(of, batch);
    case OpType::allgather:
      return allgather(of, batch);
    case OpType::broadcast:
      return broadcast(of, batch);
    case OpType::alltoall:
      return alltoall(of, batch);
    case OpType::reducescatter:
      return reducescatter(of, batch);
    case OpType::barrier:
      return {};  // that every member arrived is in the order log already
  }
  return {Code::internal, "Unknown operation type."};
}

}  // namespace horovod
