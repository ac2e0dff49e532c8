// The kernels of the collectives.
//
// A kernel hands its tensors to the engine and returns; when the operation is done, the engine's thread for completions
// gives the results to TensorFlow. No thread of TensorFlow waits, so operations of one graph may become ready in
// another order on each rank, with however few threads. With the attribute `wait` (eager calls, whose caller waits
// anyway) the calling thread works for the engine until the operation is done.
#pragma once

#include <atomic>
#include <string>

#include "tensorflow/tf_api.h"

namespace horovod::tensorflow {

// TF_DataType.
constexpr int kTfInt32 = 3;

// What the attributes of a node say; one for each node, used by all its calls.
struct CollectiveKernel {
  Collective type;
  std::string name;  // on the wire
  int32_t reduce_op = 1;
  double prescale = 1, postscale = 1;
  int32_t root = 0;
  int64_t process_set_id = 0;
  bool wait = false;
  bool has_splits = false;
  mutable std::atomic<int> calls_without_help{0};  // that are left before the next one waits for a moment; any order
};

// TensorFlow's callbacks.
template <Collective type>
void* make_collective(TF_OpKernelConstruction* construction);
void run_collective(void* kernel, TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* done);
void delete_collective(void* kernel);

}  // namespace horovod::tensorflow
