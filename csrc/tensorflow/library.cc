// What TensorFlow finds when it loads this library with tf.load_op_library: the operations, their shapes, their
// kernels.
//
// All are stateful, so that TensorFlow neither folds constants, nor merges equal calls, nor drops one whose result
// nobody uses; library.py keeps it from putting them in an order (docs/adr/0048).
#include <string>
#include <thread>
#include <vector>

#include "tensorflow/collective.h"
#include "tensorflow/done.h"
#include "tensorflow/host.h"
#include "tensorflow/python_api.h"
#include "tensorflow/tf_api.h"

namespace horovod::tensorflow {
namespace {

using Lines = std::vector<const char*>;
using Create = void* (*)(TF_OpKernelConstruction*);

std::string g_obstacle;  // why operations could not be registered

// -- shapes -----------------------------------------------------------------------------------------------------------
class Shape {
 public:
  Shape() : handle_(tf.NewShapeHandle()) {}
  explicit Shape(TF_ShapeHandle* handle) : handle_(handle) {}
  ~Shape() { tf.DeleteShapeHandle(handle_); }
  Shape(const Shape&) = delete;
  Shape& operator=(const Shape&) = delete;

  operator TF_ShapeHandle*() { return handle_; }

 private:
  TF_ShapeHandle* const handle_;
};

// How many tensors an operation is given beside the number of the call, which is its last input.
int tensors_of(TF_ShapeInferenceContext* context) {
  return static_cast<int>(tf.ShapeInferenceContextNumInputs(context)) - 1;
}

void shape_of_inputs(TF_ShapeInferenceContext* context, TF_Status* status) {
  for (int i = 0; i < tensors_of(context); ++i) {
    Shape shape;
    tf.ShapeInferenceContextGetInput(context, i, shape, status);
    tf.ShapeInferenceContextSetOutput(context, i, shape, status);
  }
}

// The input's with another number of rows.
void set_rows_unknown(TF_ShapeInferenceContext* context, int place, TF_Status* status) {
  Shape shape, row, result;
  tf.ShapeInferenceContextGetInput(context, place, shape, status);
  // A scalar has no rows; the ranks are told so together when it runs.
  if (tf.ShapeInferenceContextRankKnown(context, shape) && tf.ShapeInferenceContextRank(context, shape) == 0) return;
  if (!tf.ShapeInferenceContextRankKnown(context, shape)) {
    return tf.ShapeInferenceContextSetOutput(context, place, shape, status);
  }
  Shape rows(tf.ShapeInferenceContextVectorFromSize(context, static_cast<size_t>(-1)));
  tf.ShapeInferenceContextSubshape(context, shape, 1, tf.ShapeInferenceContextRank(context, shape), row, status);
  tf.ShapeInferenceContextConcatenateShapes(context, rows, row, result, status);
  tf.ShapeInferenceContextSetOutput(context, place, result, status);
}

void other_rows(TF_ShapeInferenceContext* context, TF_Status* status) {
  for (int i = 0; i < tensors_of(context); ++i) set_rows_unknown(context, i, status);
}

void other_rows_and_splits(TF_ShapeInferenceContext* context, TF_Status* status) {
  set_rows_unknown(context, 0, status);
  Shape splits(tf.ShapeInferenceContextVectorFromSize(context, static_cast<size_t>(-1)));
  tf.ShapeInferenceContextSetOutput(context, 1, splits, status);
}

void scalar(TF_ShapeInferenceContext* context, TF_Status* status) {
  Shape shape(tf.ShapeInferenceContextScalar(context));
  tf.ShapeInferenceContextSetOutput(context, 0, shape, status);
}

// -- what is asked of Python ------------------------------------------------------------------------------------------
struct QuestionKernel {
  Question question;
  int64_t about = 0;
};

template <Question question>
void* make_question(TF_OpKernelConstruction* construction) {
  auto* const kernel = new QuestionKernel{question};
  const char* const about = question == Question::size || question == Question::included ? "process_set_id"
                            : question == Question::due || question == Question::same    ? "comparison"
                                                                                         : nullptr;
  if (about) {
    Status status;
    tf.OpKernelConstruction_GetAttrInt64(construction, about, &kernel->about, status);
  }
  return kernel;
}

void delete_question(void* kernel) { delete static_cast<QuestionKernel*>(kernel); }

void give(const Answer& answer, TF_OpKernelContext* context) {
  Status status;
  if (answer.code != kOk) {
    status.set(answer.code, answer.sentence.c_str());
    return tf.OpKernelContext_Failure(context, status);
  }
  TF_Tensor* const output = tf.AllocateOutput(context, 0, kTfInt32, nullptr, 0, sizeof(int32_t), status);
  if (!status.ok()) return tf.OpKernelContext_Failure(context, status);
  *static_cast<int32_t*>(tf.TensorData(output)) = static_cast<int32_t>(answer.number);
  tf.DeleteTensor(output);
}

void answer(const QuestionKernel& kernel, TF_OpKernelContext* context) {
  give(ask(kernel.question, kernel.about), context);
}

void run_question(void* kernel, TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* done) {
  answer(*static_cast<const QuestionKernel*>(kernel), context);
  tf.RunAsyncOpKernelDoneCallback(done);
}

// Waits for all ranks, which must not keep a thread of TensorFlow from other operations.
void run_join(void* kernel, TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* given) {
  std::thread([kernel, context, done = Done(given)] {
    answer(*static_cast<const QuestionKernel*>(kernel), context);
    done();
  }).detach();
}

// The number of the call, which is the last input. Where there is none, the operation has failed and is over.
bool take_call(TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* done, int64_t& call) {
  Status status;
  TF_Tensor* input = nullptr;
  tf.GetInput(context, 0, &input, status);
  if (!status.ok()) {
    tf.OpKernelContext_Failure(context, status);
    tf.RunAsyncOpKernelDoneCallback(done);
    return false;
  }
  call = *static_cast<const int64_t*>(tf.TensorData(input));
  tf.DeleteTensor(input);
  return true;
}

// Whether weights are compared in this step, which it counts.
void run_due(void* kernel, TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* done) {
  int64_t call = 0;
  if (!take_call(context, done, call)) return;
  give(ask(Question::due, static_cast<const QuestionKernel*>(kernel)->about, call), context);
  tf.RunAsyncOpKernelDoneCallback(done);
}

// Waits for all ranks, which must not keep a thread of TensorFlow from other operations, and compares.
void run_comparison(void* kernel, TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* given) {
  int64_t call = 0;
  if (!take_call(context, given, call)) return;
  std::thread([about = static_cast<const QuestionKernel*>(kernel)->about, call, context, done = Done(given)] {
    give(ask(Question::same, about, call), context);
    done();
  }).detach();
}

// Compares weights in the few steps in which that is due.
void run_due_comparison(void* kernel, TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* done) {
  int64_t call = 0;
  if (!take_call(context, done, call)) return;
  const Answer due = ask(Question::due, static_cast<const QuestionKernel*>(kernel)->about, call);
  if (due.code == kOk && due.number != 0) return run_comparison(kernel, context, done);
  give(due, context);
  tf.RunAsyncOpKernelDoneCallback(done);
}

// -- registration -----------------------------------------------------------------------------------------------------
const Lines kCollective = {"T: type", "tensor_name: string", "process_set_id: int = 0", "wait: bool = false"};
const Lines kReduction = {"reduce_op: int", "prescale_factor: string = '1'", "postscale_factor: string = '1'"};

Lines operator+(Lines first, const Lines& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

struct Definition {
  const char* name;
  Lines attributes, inputs, outputs;
  TfInferShape infer_shape;
  Create create;
  TfCompute compute;
  void (*destroy)(void*);
};

void add(const Definition& definition) {
  if (!g_obstacle.empty()) return;
  Status status;
  TF_OpDefinitionBuilder* const op = tf.NewOpDefinitionBuilder(definition.name);
  for (const char* const line : definition.attributes) tf.OpDefinitionBuilderAddAttr(op, line);
  for (const char* const line : definition.inputs) tf.OpDefinitionBuilderAddInput(op, line);
  for (const char* const line : definition.outputs) tf.OpDefinitionBuilderAddOutput(op, line);
  tf.OpDefinitionBuilderSetIsStateful(op, true);
  tf.OpDefinitionBuilderSetShapeInferenceFunction(op, definition.infer_shape);
  tf.RegisterOpDefinition(op, status);
  if (status.ok()) {
    TF_KernelBuilder* const kernel =
        tf.NewAsyncKernelBuilder(definition.name, "CPU", definition.create, definition.compute, definition.destroy);
    tf.RegisterKernelBuilder(definition.name, kernel, status);
  }
  if (!status.ok()) g_obstacle = status.message();
}

void add_collective(const char* name, const Lines& more, const Lines& inputs, const Lines& outputs,
                    TfInferShape infer_shape, Create create) {
  add({name, kCollective + more, inputs + Lines{"call: int64"}, outputs, infer_shape, create, &run_collective,
       &delete_collective});
}

void add_question(const char* name, const Lines& attributes, Create create, TfCompute compute = &run_question,
                  const Lines& inputs = {}) {
  add({name, attributes, inputs, {"answer: int32"}, &scalar, create, compute, &delete_question});
}

void add_all() {
  const Lines group = {"N: int >= 1"};
  const Lines one = {"tensor: T"}, many = {"tensors: N * T"};
  add_collective("HorovodAllreduce", kReduction, one, {"sum: T"}, &shape_of_inputs,
                 &make_collective<Collective::allreduce>);
  add_collective("HorovodGroupedAllreduce", group + kReduction, many, {"sums: N * T"}, &shape_of_inputs,
                 &make_collective<Collective::allreduce>);
  add_collective("HorovodAllgather", {}, one, {"output: T"}, &other_rows, &make_collective<Collective::allgather>);
  add_collective("HorovodGroupedAllgather", group, many, {"outputs: N * T"}, &other_rows,
                 &make_collective<Collective::allgather>);
  add_collective("HorovodBroadcast", {"root_rank: int"}, one, {"output: T"}, &shape_of_inputs,
                 &make_collective<Collective::broadcast>);
  add_collective("HorovodGroupedBroadcast", group + Lines{"root_rank: int"}, many, {"outputs: N * T"}, &shape_of_inputs,
                 &make_collective<Collective::broadcast>);
  add_collective("HorovodAlltoall", {}, {"tensor: T", "splits: int32"}, {"output: T", "received_splits: int32"},
                 &other_rows_and_splits, &make_collective<Collective::alltoall>);
  add_collective("HorovodReducescatter", kReduction, one, {"output: T"}, &other_rows,
                 &make_collective<Collective::reducescatter>);
  add_collective("HorovodGroupedReducescatter", group + kReduction, many, {"outputs: N * T"}, &other_rows,
                 &make_collective<Collective::reducescatter>);
  const Lines of_set = {"process_set_id: int = 0"};
  add_question("HorovodSize", of_set, &make_question<Question::size>);
  add_question("HorovodProcessSetIncluded", of_set, &make_question<Question::included>);
  add_question("HorovodLocalSize", {}, &make_question<Question::local_size>);
  add_question("HorovodRank", {}, &make_question<Question::rank>);
  add_question("HorovodLocalRank", {}, &make_question<Question::local_rank>);
  add_question("HorovodJoin", {}, &make_question<Question::join>, &run_join);
  const Lines comparison = {"comparison: int"}, call = {"call: int64"};
  add_question("HorovodSameWeights", comparison, &make_question<Question::due>, &run_due_comparison, call);
  add_question("HorovodWeightsDue", comparison, &make_question<Question::due>, &run_due, call);
  add_question("HorovodCompareWeights", comparison, &make_question<Question::same>, &run_comparison, call);
}

// TensorFlow notes the operations that come while it loads a library. The last object here: it needs those above.
const struct OnLoad {
  OnLoad() {
    g_obstacle = load_tf();
    if (g_obstacle.empty()) g_obstacle = load_python();
    add_all();
  }
} g_on_load;

}  // namespace
}  // namespace horovod::tensorflow

extern "C" {

// Why there are no operations; "" if there are.
__attribute__((visibility("default"))) const char* horovod_tensorflow_obstacle(void) {
  return horovod::tensorflow::g_obstacle.c_str();
}

__attribute__((visibility("default"))) void horovod_tensorflow_begin(const HorovodApi* api,
                                                                     horovod::tensorflow::PyObject* answer) {
  horovod::engine_api = api;
  horovod::tensorflow::answering = answer;
}
}
