// The types of operations, one row for each. Code that needs to know the traits of a type, and not its algorithms,
// reads its row: checks, names, what ranks agree on, fusion, the timeline, the Python module. The algorithms:
// algorithms.h.
#pragma once

#include <cstdint>
#include <iterator>

namespace horovod {

// The first block is OperationTraits of protos/v1/types.proto, from which the coordinator's checks follow
// (tests/engine/test_every_operation.py compares the two).
struct OpTraits {
  const char* name = "";     // as the messages of the contract spell it
  bool no_tensors = false;   // it has no tensors: it ends when every rank has arrived
  bool reduces = false;      // has a reduce operation and factors
  bool rooted = false;       // has a root
  bool needs_rows = false;   // tensors have at least one dimension
  bool uneven_rows = false;  // the first dimension may differ from rank to rank and from step to step
  // -- traits that only the engine reads
  bool allocates = false;  // the engine makes room for results: their size is known when the operation runs
  bool fuses = false;      // several operations may run as one batch
  bool on_device = false;  // takes tensors on a GPU
};

// ROW(type, the traits that differ from the defaults of OpTraits). Numbers are those of the rows, and equal
// horovod.protos.v1.OperationType: add new ones at the end.
// clang-format off
#define HVD_OP_TYPES(ROW)                                                                                             \
  ROW(allreduce, .name = "ALLREDUCE", .reduces = true, .fuses = true, .on_device = true)                              \
  ROW(allgather, .name = "ALLGATHER", .needs_rows = true, .uneven_rows = true, .allocates = true, .fuses = true,      \
      .on_device = true)                                                                                              \
  ROW(broadcast, .name = "BROADCAST", .rooted = true, .fuses = true, .on_device = true)                               \
  ROW(alltoall, .name = "ALLTOALL", .needs_rows = true, .uneven_rows = true, .allocates = true, .on_device = true)    \
  ROW(reducescatter, .name = "REDUCESCATTER", .reduces = true, .needs_rows = true, .allocates = true, .fuses = true,  \
      .on_device = true)                                                                                              \
  ROW(barrier, .name = "BARRIER", .no_tensors = true)                                                                 \
  /* the next type */
// clang-format on

#define HVD_TYPE(type, ...) type,
enum class OpType : uint8_t { HVD_OP_TYPES(HVD_TYPE) };
#undef HVD_TYPE

#define HVD_TRAITS(type, ...) OpTraits{__VA_ARGS__},
inline constexpr OpTraits kOpTraits[] = {HVD_OP_TYPES(HVD_TRAITS)};
#undef HVD_TRAITS

inline constexpr int kOpTypeCount = static_cast<int>(std::size(kOpTraits));

constexpr const OpTraits& traits_of(OpType type) { return kOpTraits[static_cast<int>(type)]; }

// "ALLREDUCE"
constexpr const char* name_of(OpType type) { return traits_of(type).name; }

}  // namespace horovod
