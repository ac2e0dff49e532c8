// Whether all ranks train the same weights, in a compiled step (clients/horovod/jax/same_weights.py).
//
// A step has two calls. The one before its reductions has the weights and the optimizer's state as its arguments; the
// other one comes behind the reductions. In the few steps in which ranks compare, the first makes digests and sends a
// word, and waits for nobody, so the reductions begin no later on a rank that comes late. The second hears the words of
// all ranks, which have been there to reduce. Python does both. In all other steps a number is counted down here.
#pragma once

#include <cstdint>

#include "xla/ffi.h"

namespace horovod::jax {

// What Python answers; a struct in same_weights.py.
struct Said {
  int64_t compares = 0;      // whether the call behind the reductions is to ask as well
  int64_t idle = 0;          // so many steps follow in which nothing is compared
  int64_t code = 0;          // a StatusCode
  char sentence[4096] = {};  // of an error
};

// Called by threads of XLA; they take Python's lock. what: the compared arrays, of which Python knows the rest.
// skipped: steps since the last answer, of which it was not asked.
using Say = void (*)(int64_t what, int64_t skipped, const void* const* arrays, Said* said);
using Hear = void (*)(int64_t what, Said* said);

void compare_with(Say say, Hear hear);
// Steps count anew: all ranks have joined. In a new world they do so by themselves.
void count_anew();
// The handler of the call "horovod_same_weights".
xla::Error* compare(xla::CallFrame* frame);

}  // namespace horovod::jax
