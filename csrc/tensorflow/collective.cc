#include "tensorflow/collective.h"

#include <atomic>
#include <charconv>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "base/error_code.h"
#include "base/limits.h"
#include "tensorflow/done.h"
#include "tensorflow/host.h"

namespace horovod::tensorflow {
namespace {

// More iterations of a loop than this do not run at once: TensorFlow's default is 10 (parallel_iterations).
constexpr int64_t kIterationsAtOnce = 16;

// The number of a call has a digit for each function on the way to it, in this base (order/names.py).
constexpr uint64_t kCallBase = 65537;

// A small operation that is alone is awaited by the thread that starts it (limits::kKernelHelpUs), which saves the ways
// to the engine's threads and back; where that was in vain, the next calls of the node do not try. All others are left
// to the engine at once.
constexpr int64_t kHelpBytes = 64 << 10;
constexpr int kCallsWithoutHelp = 3;

// Operations of graphs that are on their way. The first one starts at once; what gets ready meanwhile travels together.
std::atomic<int> g_under_way{0};

// -- attributes -------------------------------------------------------------------------------------------------------
class Attributes {
 public:
  explicit Attributes(TF_OpKernelConstruction* construction) : construction_(construction) {}

  std::string text(const char* name) {
    int32_t list_size = 0, bytes = 0;
    tf.OpKernelConstruction_GetAttrSize(construction_, name, &list_size, &bytes, status_);
    std::string value(bytes > 0 ? bytes : 0, '\0');
    if (!value.empty()) {
      tf.OpKernelConstruction_GetAttrString(construction_, name, value.data(), value.size(), status_);
    }
    return value;
  }
  int64_t number(const char* name) {
    int64_t value = 0;
    tf.OpKernelConstruction_GetAttrInt64(construction_, name, &value, status_);
    return value;
  }
  bool flag(const char* name) {
    unsigned char value = 0;
    tf.OpKernelConstruction_GetAttrBool(construction_, name, &value, status_);
    return value != 0;
  }
  // Attributes of TensorFlow have no double precision but in text.
  double factor(const char* name) {
    const std::string value = text(name);
    double factor = 1;
    std::from_chars(value.data(), value.data() + value.size(), factor);
    return factor;
  }
  bool ok() {
    if (!status_.ok()) tf.OpKernelConstruction_Failure(construction_, status_);
    return status_.ok();
  }

 private:
  TF_OpKernelConstruction* const construction_;
  Status status_;
};

// -- one call ---------------------------------------------------------------------------------------------------------
void fail(TF_OpKernelContext* context, int code, const char* sentence) {
  Status status;
  status.set(code, sentence);
  tf.OpKernelContext_Failure(context, status);
}

void fail(TF_OpKernelContext* context, int code, ErrorCode error, const char* sentence) {
  fail(context, code, coded(error, sentence).c_str());
}

// False, and the call has failed.
bool check(TF_OpKernelContext* context, Status& status) {
  if (!status.ok()) tf.OpKernelContext_Failure(context, status);
  return status.ok();
}

// The state of one call. It lives until the engine no longer uses the call's memory and reports that with `unused`.
struct Call {
  const CollectiveKernel& kernel;
  TF_OpKernelContext* const context;
  Done done{};                     // empty where the caller waits
  std::vector<TF_Tensor*> held{};  // inputs, then outputs
  std::vector<HorovodTensor> spans{};
  std::vector<std::vector<int64_t>> shapes{};
  std::vector<int32_t> splits{};
  std::string name{};
  uint64_t number = 0;  // of the call of the function that the node is in; 0: of its first or only one
  int32_t process_set = 0;

  Call(const CollectiveKernel& its, TF_OpKernelContext* given) : kernel(its), context(given) {}
  ~Call() {
    for (TF_Tensor* const tensor : held) tf.DeleteTensor(tensor);
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  bool fills_outputs() const { return kernel.type == Collective::allreduce || kernel.type == Collective::broadcast; }
};

// -- from a node's inputs to a call of the engine ---------------------------------------------------------------------
bool read_splits(Call& call, const TF_Tensor* tensor) {
  if (tf.NumDims(tensor) != 1) {
    fail(call.context, kInvalidArgument, error_code::wrong_splits,
         "Alltoall: splits must have one dimension: the number of rows for each rank.");
    return false;
  }
  const auto* const rows = static_cast<const int32_t*>(tf.TensorData(tensor));
  call.splits.assign(rows, rows + tf.Dim(tensor, 0));
  return true;
}

bool read_tensor(Call& call, const TF_Tensor* input) {
  std::vector<int64_t> shape;
  for (int i = 0; i < tf.NumDims(input); ++i) shape.push_back(tf.Dim(input, i));
  HorovodTensor span{};
  span.input = tf.TensorData(input);
  span.dtype = engine_dtype(tf.TensorType(input));
  span.dimensions = static_cast<int32_t>(shape.size());
  span.shape = shape.data();  // stays where it is when the vector moves
  call.shapes.push_back(std::move(shape));
  call.spans.push_back(span);
  if (span.dtype >= 0) return true;
  fail(call.context, kInvalidArgument, error_code::wrong_tensor,
       "Horovod can't send tensors of this dtype; cast the tensor first.");
  return false;
}

bool read_call_number(Call& call, const TF_Tensor* tensor) {
  int64_t number = 0;
  std::memcpy(&number, tf.TensorData(tensor), sizeof(number));
  call.number = static_cast<uint64_t>(number);
  return true;
}

bool read_inputs(Call& call) {
  const int last = tf.NumInputs(call.context) - 1, tensors = last - (call.kernel.has_splits ? 1 : 0);
  for (int i = 0; i <= last; ++i) {
    Status status;
    TF_Tensor* input = nullptr;
    tf.GetInput(call.context, i, &input, status);
    if (!check(call.context, status)) return false;
    call.held.push_back(input);
    if (i == last) return read_call_number(call, input);
    if (!(i < tensors ? read_tensor(call, input) : read_splits(call, input))) return false;
  }
  return false;
}

// A broadcast changes nothing on its root, so the result is the input itself, as that of tf.identity is: not even
// where a variable or another operation has the same memory is anything copied.
bool give_input(Call& call, int place) {
  HorovodTensor& span = call.spans[place];
  Status status;
  tf.SetOutput(call.context, place, call.held[place], status);
  span.output = const_cast<void*>(span.input);
  return check(call.context, status);
}

// A result replaces its input where nothing else reads that one.
bool allocate_output(Call& call, int place) {
  HorovodTensor& span = call.spans[place];
  Status status;
  int forwarded = -1;
  TF_Tensor* const output =
      tf.ForwardInputOrAllocateOutput(call.context, &place, 1, place, span.shape, span.dimensions, &forwarded, status);
  if (!check(call.context, status)) return false;
  call.held.push_back(output);
  span.output = tf.TensorData(output);
  return true;
}

bool find_process_set(Call& call) {
  if (call.kernel.process_set_id == 0) return true;
  const Answer answer = ask(Question::set_number, call.kernel.process_set_id);
  if (answer.code != kOk) {
    fail(call.context, answer.code, answer.sentence.c_str());
    return false;
  }
  call.process_set = static_cast<int32_t>(answer.number);
  return true;
}

// Calls of one function that may run at once meet the same calls of the other ranks: "@2" is the third one in its
// caller, "@2.1" the second one in that.
std::string call_suffix(uint64_t number) {
  std::string digits;
  for (; number > 0; number /= kCallBase) {
    const std::string digit = std::to_string(number % kCallBase);
    digits = digits.empty() ? digit : digit + '.' + digits;
  }
  return digits.empty() ? digits : '@' + digits;
}

void choose_name(Call& call) {
  call.name = call.kernel.name;
  if (call.kernel.wait) return;
  call.name += call_suffix(call.number);
  // Iterations of a loop that run at once meet the same iterations of the other ranks.
  const int64_t iteration = tf.GetIterId(call.context) % kIterationsAtOnce;
  if (iteration > 0) call.name += '#' + std::to_string(iteration);
}

bool prepare(Call& call, HorovodEngine* engine) {
  if (!find_process_set(call) || !read_inputs(call)) return false;
  choose_name(call);
  if (!call.fills_outputs()) return true;
  const bool is_root = call.kernel.type == Collective::broadcast && call.kernel.root == engine_api->rank(engine);
  for (int i = 0; i < static_cast<int>(call.spans.size()); ++i) {
    if (!(is_root ? give_input(call, i) : allocate_output(call, i))) return false;
  }
  return true;
}

void unused(void* call) { delete static_cast<Call*>(call); }

HorovodCall engine_call(Call& from) {
  HorovodCall call{};
  call.struct_bytes = sizeof(call);
  call.name = from.name.c_str();
  call.type = static_cast<int32_t>(from.kernel.type);
  call.reduce_op = from.kernel.reduce_op;
  call.prescale = from.kernel.prescale;
  call.postscale = from.kernel.postscale;
  call.root = from.kernel.root;
  call.process_set = from.process_set;
  call.tensors = from.spans.data();
  call.tensor_count = from.spans.size();
  call.tensor_bytes = sizeof(HorovodTensor);
  if (!from.splits.empty()) {
    call.splits = from.splits.data();
    call.split_count = from.splits.size();
  }
  call.device = -1;
  call.context = &from;
  call.unused = &unused;
  return call;
}

// -- results ----------------------------------------------------------------------------------------------------------
void release_result(void*, size_t, void* owner) {
  HorovodResult result{};
  result.struct_bytes = sizeof(result);
  result.owner = owner;
  engine_api->release_result(&result);
}

// A tensor on the memory that the engine has allocated.
bool give_result(const Call& call, HorovodOperation* operation, int place) {
  HorovodResult result{};
  result.struct_bytes = sizeof(result);
  const int32_t code = engine_api->take_result(operation, static_cast<size_t>(place), &result);
  if (code != HOROVOD_OK) {
    fail(call.context, status_code(code), engine_api->last_error());
    return false;
  }
  const int dtype = tf_dtype(result.dtype);
  Status status;
  TF_Tensor* output = nullptr;
  if (result.bytes == 0) {  // TensorFlow can't wrap zero bytes of memory in a tensor
    output = tf.AllocateOutput(call.context, place, dtype, result.shape, result.dimensions, 0, status);
    engine_api->release_result(&result);
  } else {
    output =
        tf.NewTensor(dtype, result.shape, result.dimensions, result.data, result.bytes, &release_result, result.owner);
    tf.SetOutput(call.context, place, output, status);
  }
  if (output) tf.DeleteTensor(output);
  return check(call.context, status);
}

bool give_splits(const Call& call, HorovodOperation* operation) {
  const int32_t* rows = nullptr;
  size_t count = 0;
  const int32_t code = engine_api->received_splits(operation, &rows, &count);
  if (code != HOROVOD_OK) {
    fail(call.context, status_code(code), engine_api->last_error());
    return false;
  }
  Status status;
  const auto length = static_cast<int64_t>(count);
  TF_Tensor* const output = tf.AllocateOutput(call.context, 1, kTfInt32, &length, 1, count * sizeof(int32_t), status);
  if (!check(call.context, status)) return false;
  if (count > 0) std::memcpy(tf.TensorData(output), rows, count * sizeof(int32_t));
  tf.DeleteTensor(output);
  return true;
}

// Of an operation that is done.
void give_results(const Call& call, HorovodOperation* operation) {
  const int32_t code = engine_api->wait(operation, 0);
  if (code != HOROVOD_OK) return fail(call.context, status_code(code), engine_api->error_of(operation));
  if (call.fills_outputs()) return;
  for (size_t i = 0; i < call.spans.size(); ++i) {
    if (!give_result(call, operation, static_cast<int>(i))) return;
  }
  if (call.kernel.has_splits) give_splits(call, operation);
}

void completed(HorovodOperation* operation, void* context) {
  Call* const call = static_cast<Call*>(context);
  g_under_way.fetch_sub(1, std::memory_order_relaxed);
  give_results(*call, operation);
  const Done done = std::move(call->done);
  engine_api->release(operation);  // lets go of the inputs first, so that the next kernel may have their memory
  done();
}

// -- the ways to run --------------------------------------------------------------------------------------------------
bool is_small(const Call& call) {
  int64_t bytes = 0;
  for (const TF_Tensor* const tensor : call.held) bytes += static_cast<int64_t>(tf.TensorByteSize(tensor));
  return bytes <= kHelpBytes;
}

// For a thread that waits for the operation. Null when it was refused, which the context has been told then.
HorovodOperation* submit_and_keep(HorovodEngine* engine, std::unique_ptr<Call> call) {
  TF_OpKernelContext* const context = call->context;
  HorovodCall given = engine_call(*call);
  given.waits_next = 1;
  given.by_script = call->kernel.wait ? 1 : 0;
  (void)call.release();  // now `unused` deletes it, perhaps before submit() returns
  HorovodOperation* operation = nullptr;
  const int32_t code = engine_api->submit(engine, &given, &operation);
  if (code != HOROVOD_OK) fail(context, status_code(code), engine_api->last_error());
  return operation;
}

// Waits for a moment, and leaves what is not done then to the engine. It is the only operation of graphs under way.
void start_and_help(HorovodEngine* engine, std::unique_ptr<Call> owned, TF_AsyncOpKernelDoneCallback* done) {
  Call* const call = owned.get();
  HorovodOperation* const operation = submit_and_keep(engine, std::move(owned));
  if (operation) {
    if (engine_api->wait(operation, limits::kKernelHelpUs) == HOROVOD_TIMEOUT) {
      call->kernel.calls_without_help.store(kCallsWithoutHelp, std::memory_order_relaxed);
      call->done = Done(done);
      if (engine_api->tell_when_done(operation, &completed, call)) return;
    }
    give_results(*call, operation);
    engine_api->release(operation);
  }
  g_under_way.fetch_sub(1, std::memory_order_relaxed);
  tf.RunAsyncOpKernelDoneCallback(done);
}

void start(HorovodEngine* engine, std::unique_ptr<Call> call, TF_AsyncOpKernelDoneCallback* done) {
  const bool alone = g_under_way.fetch_add(1, std::memory_order_relaxed) == 0;
  if (alone && is_small(*call)) {
    std::atomic<int>& without = call->kernel.calls_without_help;
    if (without.load(std::memory_order_relaxed) <= 0) return start_and_help(engine, std::move(call), done);
    without.fetch_sub(1, std::memory_order_relaxed);
  }
  TF_OpKernelContext* const context = call->context;
  call->done = Done(done);
  HorovodCall given = engine_call(*call);
  given.completed = &completed;
  given.starts_at_once = alone;
  (void)call.release();  // now `unused` deletes it, perhaps before submit() returns
  const int32_t code = engine_api->submit(engine, &given, nullptr);
  if (code == HOROVOD_OK) return;
  g_under_way.fetch_sub(1, std::memory_order_relaxed);
  fail(context, status_code(code), engine_api->last_error());
  tf.RunAsyncOpKernelDoneCallback(done);
}

void run(HorovodEngine* engine, std::unique_ptr<Call> owned) {
  Call* const call = owned.get();
  TF_OpKernelContext* const context = call->context;
  HorovodOperation* const operation = submit_and_keep(engine, std::move(owned));
  if (!operation) return;
  while (engine_api->wait(operation, limits::kSignalCheckUs) == HOROVOD_TIMEOUT) {
    if (!interrupted()) continue;
    fail(context, kCancelled, error_code::interrupted,
         "A signal has interrupted the wait for other ranks; the operation goes on without it.");
    return engine_api->release(operation);
  }
  give_results(*call, operation);
  engine_api->release(operation);
}

void* make(TF_OpKernelConstruction* construction, Collective type) {
  Attributes attributes(construction);
  auto kernel = std::make_unique<CollectiveKernel>();
  kernel->type = type;
  kernel->name = attributes.text("tensor_name");
  kernel->process_set_id = attributes.number("process_set_id");
  kernel->wait = attributes.flag("wait");
  kernel->has_splits = type == Collective::alltoall;
  if (type == Collective::broadcast) kernel->root = static_cast<int32_t>(attributes.number("root_rank"));
  if (type == Collective::allreduce || type == Collective::reducescatter) {
    kernel->reduce_op = static_cast<int32_t>(attributes.number("reduce_op"));
    kernel->prescale = attributes.factor("prescale_factor");
    kernel->postscale = attributes.factor("postscale_factor");
  }
  return attributes.ok() ? kernel.release() : nullptr;
}

}  // namespace

template <Collective type>
void* make_collective(TF_OpKernelConstruction* construction) {
  return make(construction, type);
}
template void* make_collective<Collective::allreduce>(TF_OpKernelConstruction*);
template void* make_collective<Collective::allgather>(TF_OpKernelConstruction*);
template void* make_collective<Collective::broadcast>(TF_OpKernelConstruction*);
template void* make_collective<Collective::alltoall>(TF_OpKernelConstruction*);
template void* make_collective<Collective::reducescatter>(TF_OpKernelConstruction*);

void run_collective(void* given, TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* done) {
  const auto& kernel = *static_cast<const CollectiveKernel*>(given);
  auto call = std::make_unique<Call>(kernel, context);
  const EngineReference engine;
  if (!engine.get()) {
    const Answer why = ask(Question::set_number);  // Python knows whether this process is the child of a rank
    fail(context, kFailedPrecondition, why.code == kOk ? kNotInitialized : why.sentence.c_str());
  } else if (prepare(*call, engine.get())) {
    if (!kernel.wait) return start(engine.get(), std::move(call), done);
    run(engine.get(), std::move(call));
  }
  call.reset();
  tf.RunAsyncOpKernelDoneCallback(done);
}

void delete_collective(void* kernel) { delete static_cast<CollectiveKernel*>(kernel); }

}  // namespace horovod::tensorflow
