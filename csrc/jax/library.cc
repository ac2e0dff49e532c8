// What makes csrc/xla a library for JAX: Python gives it the engine and a function that it may ask, and registers the
// handler with JAX. Nothing here is built against JAX or linked to it.
#include "jax/comparison.h"
#include "xla/handler.h"

namespace horovod::jax {
namespace {

// Of clients/horovod/jax/library.py: the engine's number of a process set plus one; 0 where this rank is no member of
// such a set (any more). Takes Python's lock.
using SetNumber = int64_t (*)(int64_t process_set_id);
SetNumber g_set_number = nullptr;

Answer set_number(int64_t process_set_id) {
  const int64_t found = g_set_number(process_set_id);
  if (found > 0) return {kOk, found - 1, ""};
  return {kInvalidArgument, 0,
          "This rank is not a member of process set " + std::to_string(process_set_id) +
              ", or the set is not registered in this world. Make functions that use a process set anew in each world. "
              "[no-such-process-set]"};
}

}  // namespace
}  // namespace horovod::jax

// To be called once, before anything is compiled.
extern "C" __attribute__((visibility("default"))) void horovod_jax_begin(const HorovodApi* api,
                                                                         int64_t (*set_number)(int64_t)) {
  horovod::engine_api = api;
  horovod::jax::g_set_number = set_number;
}

// The handler for jax.ffi.register_ffi_target, of the CPU or of GPUs with CUDA.
extern "C" __attribute__((visibility("default"))) void* horovod_jax_handler(int32_t on_gpu) {
  return reinterpret_cast<void*>(horovod::xla::handler_for(
      {&horovod::jax::set_number,
       "XLA needs to know the shape of a result when it compiles, so under jax.jit all ranks must give the same number "
       "of rows. Call it outside of jax.jit where they do not. [mismatched-operations]",
       "This JAX has another version of XLA's custom calls than 0.x of JAX 0.10 or newer. [not-compilable]"},
      on_gpu ? horovod::xla::Platform::cuda : horovod::xla::Platform::host));
}

// The handler of the call "horovod_after_all" (clients/horovod/jax/overlap.py).
extern "C" __attribute__((visibility("default"))) horovod::xla::Error* horovod_jax_after_all(
    horovod::xla::CallFrame* frame) {
  return horovod::xla::do_nothing(frame);
}

// What the call "horovod_same_weights" asks Python. To be called once, before anything is compiled.
extern "C" __attribute__((visibility("default"))) void horovod_jax_compare_with(horovod::jax::Say say,
                                                                                horovod::jax::Hear hear) {
  horovod::jax::compare_with(say, hear);
}

extern "C" __attribute__((visibility("default"))) void horovod_jax_count_anew() { horovod::jax::count_anew(); }

extern "C" __attribute__((visibility("default"))) horovod::xla::Error* horovod_jax_same_weights(
    horovod::xla::CallFrame* frame) {
  return horovod::jax::compare(frame);
}
