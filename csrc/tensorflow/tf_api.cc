#include "tensorflow/tf_api.h"

#include <dlfcn.h>

#include <iterator>
#include <string>

namespace horovod::tensorflow {

constinit TfApi tf;  // before the objects that are made when this library is loaded

namespace {

// By soname: it is loaded already, whether with its symbols for everybody or not.
constexpr const char* kTensorFlow = "libtensorflow_framework.so.2";

// tensorflow::Device::ComputeAsync(AsyncOpKernel*, OpKernelContext*, std::function<void()>) as GNU's C++ library names
// it. The last argument is what done.h copies.
constexpr const char* kTakesDone =
    "_ZN10tensorflow6Device12ComputeAsyncEPNS_13AsyncOpKernelEPNS_15OpKernelContextESt8functionIFvvEE";

// TF_DataType of each dtype of the engine, in the order of DType in protos/v1/types.proto.
constexpr int kTfDtypes[] = {
    4,   // uint8
    6,   // int8
    5,   // int16
    3,   // int32
    9,   // int64
    19,  // half
    14,  // bfloat16
    1,   // float
    2,   // double
    10,  // bool
    17,  // uint16
    25,  // float8_e4m3fn
    24,  // float8_e5m2
    22,  // uint32
    23,  // uint64
};

}  // namespace

const char* load_tf() {
  static std::string missing;
  void* const library = dlopen(kTensorFlow, RTLD_NOLOAD | RTLD_LAZY);
  if (!library) return "TensorFlow is not loaded: its libtensorflow_framework.so.2 was not found in this process.";
#define HOROVOD_TF_LOOK_UP(returns, name, arguments)                                           \
  tf.name = reinterpret_cast<decltype(tf.name)>(dlsym(library, "TF_" #name));                  \
  if (!tf.name) {                                                                              \
    missing = "This TensorFlow has no TF_" #name " in its C API. Install a newer TensorFlow."; \
    return missing.c_str();                                                                    \
  }
  HOROVOD_TF_FUNCTIONS(HOROVOD_TF_LOOK_UP)
#undef HOROVOD_TF_LOOK_UP
  if (!dlsym(library, kTakesDone)) {
    return "Its kernels end by a callback of another kind than in TensorFlow's packages of PyPI, which are compiled "
           "with "
           "GNU's C++ library. Install one of those: pip install tensorflow.";
  }
  return "";
}

int engine_dtype(int tf_dtype) {
  for (size_t dtype = 0; dtype < std::size(kTfDtypes); ++dtype) {
    if (kTfDtypes[dtype] == tf_dtype) return static_cast<int>(dtype);
  }
  return -1;
}

int tf_dtype(int engine_dtype) { return kTfDtypes[engine_dtype]; }

}  // namespace horovod::tensorflow
