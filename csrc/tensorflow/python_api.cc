#include "tensorflow/python_api.h"

#include <dlfcn.h>

namespace horovod::tensorflow {

constinit PythonApi python;

const char* load_python() {
#define HOROVOD_PYTHON_LOOK_UP(returns, name, arguments)                             \
  python.name = reinterpret_cast<decltype(python.name)>(dlsym(RTLD_DEFAULT, #name)); \
  if (!python.name) return "This Python has no " #name " that a library can find in its process.";
  HOROVOD_PYTHON_FUNCTIONS(HOROVOD_PYTHON_LOOK_UP)
#undef HOROVOD_PYTHON_LOOK_UP
  return "";
}

}  // namespace horovod::tensorflow
