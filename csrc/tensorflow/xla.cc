// The collectives inside of what XLA compiles (jit_compile=True): finds XLA in TensorFlow and registers csrc/xla there.
#include <dlfcn.h>

#include <string>

#include "tensorflow/host.h"
#include "xla/handler.h"

namespace horovod::tensorflow {
namespace {

constexpr const char* kXla = "libtensorflow_cc.so.2";
// The second is the same in C++, which is all that some builds export.
constexpr const char* kGetApi[] = {"XLA_FFI_GetApi", "_ZN3xla3ffi12GetXlaFfiApiEv"};

std::string register_with_xla() {
  void* const library = dlopen(kXla, RTLD_NOLOAD | RTLD_LAZY);
  const xla::Api* (*get_api)() = nullptr;
  for (const char* const name : kGetApi) {
    if (library && !get_api) get_api = reinterpret_cast<decltype(get_api)>(dlsym(library, name));
  }
  if (!get_api) return "This TensorFlow offers no XLA custom calls.";
  return xla::register_handler(
      get_api(), {[](int64_t process_set_id) { return ask(Question::set_number, process_set_id); },
                  "XLA needs to know the shape of a result when it compiles, so with jit_compile=True all ranks must "
                  "give the same number of rows. Use jit_compile=False where they do not. [mismatched-operations]",
                  "This TensorFlow has another version of XLA's custom calls."});
}

}  // namespace
}  // namespace horovod::tensorflow

// Why XLA can't call the collectives; "" if it can.
extern "C" __attribute__((visibility("default"))) const char* horovod_tensorflow_register_xla(void) {
  static std::string obstacle;
  obstacle = horovod::tensorflow::register_with_xla();
  return obstacle.c_str();
}
