#include "collectives/algorithms.h"

#include "collectives/hierarchical/collectives.h"
#include "collectives/mesh/collectives.h"
#include "collectives/shared/collectives.h"
#include "collectives/sparse/collectives.h"

namespace horovod {
namespace algorithms {

const Algorithms allreduce{shared::allreduce, mesh::allreduce, hierarchical::allreduce, sparse::allreduce};
const Algorithms allgather{shared::allgather, mesh::allgather, nullptr, sparse::allgather};
const Algorithms broadcast{shared::broadcast, mesh::broadcast, nullptr, sparse::broadcast};
const Algorithms alltoall{shared::alltoall, mesh::alltoall, nullptr, sparse::alltoall};
const Algorithms reducescatter{shared::reducescatter, mesh::reducescatter, hierarchical::reducescatter,
                               sparse::reducescatter};
const Algorithms barrier{};  // no functions: the order log says already that every member has arrived

}  // namespace algorithms

const Algorithms& algorithms_of(OpType type) {
#define HVD_ADDRESS(type, ...) &algorithms::type,
  static constexpr const Algorithms* kAll[] = {HVD_OP_TYPES(HVD_ADDRESS)};
#undef HVD_ADDRESS
  return *kAll[static_cast<int>(type)];
}

}  // namespace horovod
