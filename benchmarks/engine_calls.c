/* The engine called from C, as a native operation of a framework calls it: what benchmarks/tensorflow.py compares with.
 */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "bindings/c_api.h"

static double now(void) {
  struct timespec at;
  clock_gettime(CLOCK_MONOTONIC, &at);
  return (double)at.tv_sec + 1e-9 * (double)at.tv_nsec;
}

/* Seconds for each of `calls` sums, or broadcasts of rank 0's, of `count` float32 tensors in place as one operation;
 * negative: it failed. `type` as in HorovodCall. */
double seconds_for_a_call(const HorovodApi* api, const char* name, int32_t type, const int64_t* elements, int32_t count,
                          int32_t calls) {
  HorovodEngine* const engine = api->current_engine();
  HorovodTensor* const tensors = calloc((size_t)count, sizeof(*tensors));
  float** const memory = calloc((size_t)count, sizeof(*memory));
  double seconds = -1;
  if (!engine || !tensors || !memory) return seconds;
  for (int32_t i = 0; i < count; ++i) {
    memory[i] = calloc((size_t)elements[i], sizeof(float));
    const HorovodTensor made = {memory[i], memory[i], 7 /* float32 */, 1, &elements[i]};
    tensors[i] = made;
  }
  HorovodCall call;
  memset(&call, 0, sizeof(call));
  call.struct_bytes = sizeof(call);
  call.name = name;
  call.type = type;
  call.reduce_op = 1; /* sum */
  call.prescale = call.postscale = 1.0;
  call.tensors = tensors;
  call.tensor_count = (size_t)count;
  call.tensor_bytes = sizeof(*tensors);
  call.device = -1;
  call.waits_next = 1;
  const double begin = now();
  int32_t code = HOROVOD_OK;
  for (int32_t i = 0; i < calls && code == HOROVOD_OK; ++i) {
    HorovodOperation* operation = NULL;
    code = api->submit(engine, &call, &operation);
    if (code == HOROVOD_OK) code = api->wait(operation, -1);
    api->release(operation);
  }
  if (code == HOROVOD_OK) seconds = (now() - begin) / calls;
  for (int32_t i = 0; i < count; ++i) free(memory[i]);
  free(memory);
  free(tensors);
  api->release_engine(engine);
  return seconds;
}
