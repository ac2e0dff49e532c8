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

/* Memory that was written to, so that no page of it has to be found while time is taken; null where there is none. */
static float* filled(int64_t elements) {
  float* const memory = malloc((size_t)elements * sizeof(float));
  for (int64_t i = 0; memory && i < elements; ++i) memory[i] = 1;
  return memory;
}

/* Seconds for each of `calls` sums, or broadcasts of rank 0's, of `count` float32 tensors as one operation; negative: it
 * failed. `type` as in HorovodCall. in_place: the results replace the tensors; else they have memory of their own. */
double seconds_for_a_call(const HorovodApi* api, const char* name, int32_t type, const int64_t* elements, int32_t count,
                          int32_t calls, int32_t in_place) {
  HorovodEngine* const engine = api->current_engine();
  HorovodTensor* const tensors = calloc((size_t)count, sizeof(*tensors));
  float** const memory = calloc(2 * (size_t)count, sizeof(*memory));
  double seconds = -1;
  if (!engine || !tensors || !memory) return seconds;
  for (int32_t i = 0; i < count; ++i) {
    float* const input = memory[2 * i] = filled(elements[i]);
    float* const output = in_place ? input : (memory[2 * i + 1] = filled(elements[i]));
    if (!input || !output) return seconds;
    const HorovodTensor made = {input, output, 7 /* float32 */, 1, &elements[i]};
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
  for (int32_t i = 0; i < 2 * count; ++i) free(memory[i]);
  free(memory);
  free(tensors);
  api->release_engine(engine);
  return seconds;
}
