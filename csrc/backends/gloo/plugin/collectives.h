// The engine's collectives made of Gloo's. They throw Gloo's exceptions.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include <gloo/context.h>

#include "collectives/batch.h"

namespace horovod::gloo_plugin {

// Where a batch runs, and the tag of Gloo's next operation: a new number each time, equal on all members.
struct Run {
  const std::shared_ptr<::gloo::Context>& context;
  uint32_t& next_tag;

  int rank() const { return context->rank; }
  int size() const { return context->size; }

  template <typename Options>
  Options options() {
    Options made(context);
    made.setTag(next_tag++);
    return made;
  }
};

Status allreduce(Run run, Batch batch);      // Gloo's ring
Status broadcast(Run run, Batch batch);      // Gloo's binomial tree
Status allgather(Run run, Batch batch);      // exchanges row counts, then runs Gloo's allgatherv
Status alltoall(Run run, Batch batch);       // exchanges row counts, then runs Gloo's alltoallv
Status reducescatter(Run run, Batch batch);  // Gloo's alltoallv; rows are reduced in the order of the ranks

inline Status no_memory(const Operation& operation) {
  return {Code::internal, error_code::out_of_memory,
          "There is not enough memory for the result of " + operation.spec.name + "."};
}

}  // namespace horovod::gloo_plugin
