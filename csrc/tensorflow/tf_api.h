// TensorFlow's C API, as much of it as our operations need, declared by hand.
//
// No header of TensorFlow is needed to build this library and it is linked to none: the functions are looked up in the
// TensorFlow that the process has loaded, so one file serves all versions that have them (docs/adr/0048).
#pragma once

#include <cstddef>
#include <cstdint>

#include "bindings/c_client.h"

extern "C" {
typedef struct TF_Status TF_Status;
typedef struct TF_Tensor TF_Tensor;
typedef struct TF_OpDefinitionBuilder TF_OpDefinitionBuilder;
typedef struct TF_ShapeInferenceContext TF_ShapeInferenceContext;
typedef struct TF_ShapeHandle TF_ShapeHandle;
typedef struct TF_KernelBuilder TF_KernelBuilder;
typedef struct TF_OpKernelConstruction TF_OpKernelConstruction;
typedef struct TF_OpKernelContext TF_OpKernelContext;
typedef struct TF_AsyncOpKernelDoneCallback TF_AsyncOpKernelDoneCallback;
}

namespace horovod::tensorflow {

using TfCompute = void (*)(void* kernel, TF_OpKernelContext*, TF_AsyncOpKernelDoneCallback*);
using TfInferShape = void (*)(TF_ShapeInferenceContext*, TF_Status*);
using TfDeallocate = void (*)(void* data, size_t bytes, void* argument);

// X(what it returns, its name without TF_, its arguments)
#define HOROVOD_TF_FUNCTIONS(X)                                                                                   \
  X(TF_Status*, NewStatus, (void))                                                                                \
  X(void, DeleteStatus, (TF_Status*))                                                                             \
  X(void, SetStatus, (TF_Status*, int code, const char*))                                                         \
  X(int, GetCode, (const TF_Status*))                                                                             \
  X(const char*, Message, (const TF_Status*))                                                                     \
  X(TF_OpDefinitionBuilder*, NewOpDefinitionBuilder, (const char*))                                               \
  X(void, OpDefinitionBuilderAddAttr, (TF_OpDefinitionBuilder*, const char*))                                     \
  X(void, OpDefinitionBuilderAddInput, (TF_OpDefinitionBuilder*, const char*))                                    \
  X(void, OpDefinitionBuilderAddOutput, (TF_OpDefinitionBuilder*, const char*))                                   \
  X(void, OpDefinitionBuilderSetIsStateful, (TF_OpDefinitionBuilder*, bool))                                      \
  X(void, OpDefinitionBuilderSetShapeInferenceFunction, (TF_OpDefinitionBuilder*, TfInferShape))                  \
  X(void, RegisterOpDefinition, (TF_OpDefinitionBuilder*, TF_Status*))                                            \
  X(TF_ShapeHandle*, NewShapeHandle, (void))                                                                      \
  X(void, DeleteShapeHandle, (TF_ShapeHandle*))                                                                   \
  X(int64_t, ShapeInferenceContextNumInputs, (TF_ShapeInferenceContext*))                                         \
  X(void, ShapeInferenceContextGetInput, (TF_ShapeInferenceContext*, int, TF_ShapeHandle*, TF_Status*))           \
  X(void, ShapeInferenceContextSetOutput, (TF_ShapeInferenceContext*, int, TF_ShapeHandle*, TF_Status*))          \
  X(int, ShapeInferenceContextRankKnown, (TF_ShapeInferenceContext*, TF_ShapeHandle*))                            \
  X(int64_t, ShapeInferenceContextRank, (TF_ShapeInferenceContext*, TF_ShapeHandle*))                             \
  X(TF_ShapeHandle*, ShapeInferenceContextScalar, (TF_ShapeInferenceContext*))                                    \
  X(TF_ShapeHandle*, ShapeInferenceContextVectorFromSize, (TF_ShapeInferenceContext*, size_t))                    \
  X(void, ShapeInferenceContextSubshape,                                                                          \
    (TF_ShapeInferenceContext*, TF_ShapeHandle*, int64_t start, int64_t end, TF_ShapeHandle*, TF_Status*))        \
  X(void, ShapeInferenceContextConcatenateShapes,                                                                 \
    (TF_ShapeInferenceContext*, TF_ShapeHandle*, TF_ShapeHandle*, TF_ShapeHandle*, TF_Status*))                   \
  X(TF_KernelBuilder*, NewAsyncKernelBuilder,                                                                     \
    (const char* op, const char* device, void* (*create)(TF_OpKernelConstruction*), TfCompute,                    \
     void (*destroy)(void*)))                                                                                     \
  X(void, RegisterKernelBuilder, (const char* name, TF_KernelBuilder*, TF_Status*))                               \
  X(void, OpKernelConstruction_GetAttrSize,                                                                       \
    (TF_OpKernelConstruction*, const char*, int32_t* list_size, int32_t* total_size, TF_Status*))                 \
  X(void, OpKernelConstruction_GetAttrString, (TF_OpKernelConstruction*, const char*, char*, size_t, TF_Status*)) \
  X(void, OpKernelConstruction_GetAttrInt64, (TF_OpKernelConstruction*, const char*, int64_t*, TF_Status*))       \
  X(void, OpKernelConstruction_GetAttrBool, (TF_OpKernelConstruction*, const char*, unsigned char*, TF_Status*))  \
  X(void, OpKernelConstruction_Failure, (TF_OpKernelConstruction*, TF_Status*))                                   \
  X(int, NumInputs, (TF_OpKernelContext*))                                                                        \
  X(void, GetInput, (TF_OpKernelContext*, int, TF_Tensor**, TF_Status*))                                          \
  X(void, SetOutput, (TF_OpKernelContext*, int, const TF_Tensor*, TF_Status*))                                    \
  X(TF_Tensor*, ForwardInputOrAllocateOutput,                                                                     \
    (TF_OpKernelContext*, const int* candidates, int count, int output, const int64_t* dimensions, int rank,      \
     int* forwarded, TF_Status*))                                                                                 \
  X(TF_Tensor*, AllocateOutput,                                                                                   \
    (TF_OpKernelContext*, int output, int dtype, const int64_t* dimensions, int rank, size_t bytes, TF_Status*))  \
  X(int64_t, GetIterId, (TF_OpKernelContext*))                                                                    \
  X(void, OpKernelContext_Failure, (TF_OpKernelContext*, TF_Status*))                                             \
  X(void, RunAsyncOpKernelDoneCallback, (TF_AsyncOpKernelDoneCallback*))                                          \
  X(TF_Tensor*, NewTensor,                                                                                        \
    (int dtype, const int64_t* dimensions, int rank, void* data, size_t bytes, TfDeallocate, void* argument))     \
  X(void, DeleteTensor, (TF_Tensor*))                                                                             \
  X(int, TensorType, (const TF_Tensor*))                                                                          \
  X(int, NumDims, (const TF_Tensor*))                                                                             \
  X(int64_t, Dim, (const TF_Tensor*, int))                                                                        \
  X(void*, TensorData, (const TF_Tensor*))                                                                        \
  X(size_t, TensorByteSize, (const TF_Tensor*))

struct TfApi {
#define HOROVOD_TF_MEMBER(returns, name, arguments) returns(*name) arguments = nullptr;
  HOROVOD_TF_FUNCTIONS(HOROVOD_TF_MEMBER)
#undef HOROVOD_TF_MEMBER
};

// Filled by load_tf() before anything else here runs.
extern TfApi tf;

// Looks the functions up. What is missing, in a sentence; "" if nothing is.
const char* load_tf();

// TF_Status with an owner.
class Status {
 public:
  Status() : status_(tf.NewStatus()) {}
  ~Status() { tf.DeleteStatus(status_); }
  Status(const Status&) = delete;
  Status& operator=(const Status&) = delete;

  operator TF_Status*() { return status_; }
  bool ok() const { return tf.GetCode(status_) == kOk; }
  const char* message() const { return tf.Message(status_); }
  void set(int code, const char* sentence) { tf.SetStatus(status_, code, sentence); }

 private:
  TF_Status* const status_;
};

// The engine's dtype of a TF_DataType, or -1; and back.
int engine_dtype(int tf_dtype);
int tf_dtype(int engine_dtype);

}  // namespace horovod::tensorflow
