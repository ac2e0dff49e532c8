#include "bindings/c_api.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <limits>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/limits.h"
#include "bindings/c_engine.h"
#include "engine/engine.h"
#include "engine/waiting_thread.h"

// References are counted by hand, since C releases them.
struct HorovodEngine {
  std::atomic<int> references{1};  // relaxed to count up, acquire-release to count down: the last one destroys
  std::weak_ptr<horovod::Engine> engine;
  const pid_t process = getpid();
};

struct HorovodOperation {
  std::shared_ptr<horovod::Submission> submission;
  std::weak_ptr<horovod::Engine> engine;
  horovod::KeepAlive used;  // calls HorovodCall::unused when its last copy goes
  // Counts the script's thread as waiting. It waits in slices and looks for signals between them; it starts nothing
  // there, so it is blocked between them too.
  std::optional<horovod::WaitingThread::Wait> waiting;
};

namespace horovod {
namespace {

thread_local std::string t_error;
std::mutex g_current_mutex;          // guards g_current
HorovodEngine* g_current = nullptr;  // owns a reference

int32_t code_of(Code code) {
  switch (code) {
    case Code::ok:
      return HOROVOD_OK;
    case Code::invalid_argument:
      return HOROVOD_INVALID_ARGUMENT;
    case Code::precondition:
      return HOROVOD_PRECONDITION;
    case Code::aborted:
    case Code::left:
    case Code::timeout:
    case Code::interrupted:
      return HOROVOD_ABORTED;
    case Code::internal:
      break;
  }
  return HOROVOD_INTERNAL;
}

int32_t answer(const Status& status) {
  t_error = status.message();
  return code_of(status.code());
}

// No C++ exception leaves a function of the C interface.
template <typename Body>
int32_t guarded_call(Body&& body) noexcept {
  try {
    return answer(body());
  } catch (const std::exception& error) {
    t_error.clear();
    t_error.append(error.what(), std::min(std::strlen(error.what()), t_error.capacity()));  // there may be no memory
    return HOROVOD_INTERNAL;
  }
}

// For a call that is wrong by itself; horovod's own libraries make none.
Status invalid(std::string_view sentence) { return {Code::invalid_argument, error_code::internal, sentence}; }

// As much of the caller's struct as both sides know.
template <typename Struct>
Struct known(const void* given, size_t bytes) {
  static_assert(std::is_trivially_copyable_v<Struct>);
  Struct made{};
  std::memcpy(&made, given, std::min(bytes, sizeof(Struct)));
  return made;
}

Status add_c_tensor(const HorovodTensor& tensor, Submission& submission) {
  if (tensor.dtype < 0 || tensor.dtype >= kDTypeCount)
    return invalid("Unknown dtype " + std::to_string(tensor.dtype) + ".");
  if (tensor.dimensions < 0 || (tensor.dimensions > 0 && !tensor.shape)) return invalid("A tensor has no shape.");
  TensorSpec spec;
  spec.dtype = static_cast<DType>(tensor.dtype);
  if (tensor.dimensions > 0) spec.shape.assign(tensor.shape, tensor.shape + tensor.dimensions);
  const auto* const input = static_cast<const std::byte*>(tensor.input);
  submission.spans.push_back({input, static_cast<std::byte*>(tensor.output), spec.elements()});
  submission.spec.tensors.push_back(std::move(spec));
  return {};
}

Status read_call(const HorovodCall& call, Submission& submission) {
  if (!call.name) return invalid("An operation needs a name.");
  if (call.type < 0 || call.type >= kOpTypeCount) return invalid("Unknown kind of operation.");
  if (call.reduce_op < 0 || call.reduce_op >= kReduceOpCount) {
    return invalid("Unknown reduce operation " + std::to_string(call.reduce_op) + ".");
  }
  if (call.tensor_count > 0 && (!call.tensors || call.tensor_bytes == 0)) return invalid("The tensors are missing.");
  OpSpec& spec = submission.spec;
  spec.name = call.name;
  spec.type = static_cast<OpType>(call.type);
  spec.reduce_op = static_cast<ReduceOp>(call.reduce_op);
  spec.prescale = call.prescale;
  spec.postscale = call.postscale;
  spec.root = call.root;
  spec.process_set = call.process_set;
  const auto* at = reinterpret_cast<const std::byte*>(call.tensors);
  for (size_t i = 0; i < call.tensor_count; ++i, at += call.tensor_bytes) {
    HVD_TRY(add_c_tensor(known<HorovodTensor>(at, call.tensor_bytes), submission));
    const bool results_given = !traits_of(spec.type).allocates;
    if (results_given && !submission.spans.back().output && submission.spans.back().count > 0) {
      return {Code::invalid_argument, error_code::wrong_tensor, spec.name + ": a tensor has no memory for its result."};
    }
  }
  if (call.splits) submission.splits.assign(call.splits, call.splits + call.split_count);
  if (call.device >= 0) {
    spec.device = DeviceKind::gpu;
    submission.on_device = std::make_unique<OnDevice>();
    submission.on_device->ordinal = call.device;
    submission.on_device->stream = call.stream;
  }
  return {};
}

Status shut_down() { return {Code::aborted, error_code::shut_down, "Horovod has been shut down."}; }

Status done_of(const HorovodOperation& operation) {
  const Submission& submission = *operation.submission;
  if (submission.is_done()) return {};
  return invalid(submission.spec.name + " is not done yet.");
}

// -- the functions of the table ---------------------------------------------------------------------------------------

const char* c_last_error() { return t_error.c_str(); }

void c_retain_engine(HorovodEngine* engine) { engine->references.fetch_add(1, std::memory_order_relaxed); }

void c_release_engine(HorovodEngine* engine) {
  if (engine && engine->references.fetch_sub(1, std::memory_order_acq_rel) == 1) delete engine;
}

HorovodEngine* c_current_engine() {
  const std::lock_guard<std::mutex> lock(g_current_mutex);
  if (!g_current || g_current->process != getpid()) return nullptr;
  c_retain_engine(g_current);
  return g_current;
}

void c_release(HorovodOperation* operation) {
  if (!operation) return;
  if (const std::shared_ptr<Engine> engine = operation->engine.lock(); engine && operation->used.use_count() > 0) {
    try {
      engine->abandon(operation->submission, operation->used);
    } catch (const std::bad_alloc&) {
      new (std::nothrow) KeepAlive(operation->used);  // kept for ever: that is better than too short
    }
  }
  delete operation;
}

int32_t c_submit(HorovodEngine* engine, const HorovodCall* given, HorovodOperation** out) {
  const int32_t code = guarded_call([&]() -> Status {
    if (!engine || !given) return invalid("submit() needs an engine and a call.");
    const HorovodCall call = known<HorovodCall>(given, given->struct_bytes);
    KeepAlive used;
    if (call.unused) used = KeepAlive(call.context, call.unused);
    if (!out && !call.completed) return invalid("Nobody would know of the operation.");
    if (engine->process != getpid())
      return {Code::aborted, error_code::forked_child, "The engine can't be used in a forked child."};
    const std::shared_ptr<Engine> living = engine->engine.lock();
    if (!living) return shut_down();
    auto operation = std::make_unique<HorovodOperation>();
    operation->submission = std::make_shared<Submission>();
    operation->engine = engine->engine;
    operation->used = std::move(used);
    Submission& submission = *operation->submission;
    submission.by_graph = call.by_script == 0;
    HVD_TRY(read_call(call, submission));
    if (call.completed) {
      submission.on_done = [completed = call.completed, context = call.context,
                            made = operation.get()](const std::shared_ptr<Submission>&) { completed(made, context); };
    }
    const std::shared_ptr<Submission> started = operation->submission;
    if (out) *out = operation.get();
    HVD_TRY(living->start(started, call.waits_next       ? Start::by_waiter
                                   : call.starts_at_once ? Start::at_once
                                                         : Start::gathered));
    (void)operation.release();  // the caller's from here on; `completed` may have released it already
    return {};
  });
  if (code != HOROVOD_OK && out) *out = nullptr;
  return code;
}

int32_t c_wait(HorovodOperation* operation, int64_t timeout_us) {
  bool in_time = true;
  const int32_t code = guarded_call([&]() -> Status {
    constexpr int64_t kForEver = std::numeric_limits<int64_t>::max() / 2;
    Submission& submission = *operation->submission;
    const int64_t limit = now_us() + (timeout_us < 0 ? kForEver : std::min(timeout_us, kForEver));
    std::optional<WaitingThread::Wait>& waiting = operation->waiting;
    if (!submission.by_graph && !waiting) waiting.emplace();
    while (!submission.is_done()) {
      const int64_t left_us = limit - now_us();
      in_time = left_us > 0;
      if (!in_time) return {};
      const std::shared_ptr<Engine> engine = operation->engine.lock();
      if (!engine) return shut_down();
      if (!engine->wait(submission, std::min(left_us, limits::kSignalCheckUs)) && waiting) waiting->blocked();
    }
    waiting.reset();
    return submission.status;
  });
  return in_time ? code : HOROVOD_TIMEOUT;
}

int32_t c_poll(HorovodOperation* operation) { return operation->submission->is_done(); }

const char* c_error_of(HorovodOperation* operation) { return operation->submission->status.message().c_str(); }

int32_t c_collect(HorovodOperation* operation, uintptr_t stream) {
  return guarded_call([&]() -> Status {
    HVD_TRY(done_of(*operation));
    const std::shared_ptr<Engine> engine = operation->engine.lock();
    if (!engine) return shut_down();
    return engine->collect(operation->submission, stream, [&] { return operation->used; });
  });
}

int32_t c_take_result(HorovodOperation* operation, size_t tensor, HorovodResult* result) {
  return guarded_call([&]() -> Status {
    HVD_TRY(done_of(*operation));
    Submission& submission = *operation->submission;
    if (!submission.status.ok()) return submission.status;
    if (tensor >= submission.outputs.size() || !submission.outputs[tensor].data) {
      return invalid(submission.spec.name + " has no result in memory of the engine at this place (any more).");
    }
    auto taken = std::make_unique<OutputBuffer>(std::move(submission.outputs[tensor]));
    HorovodResult made{};
    made.struct_bytes = result->struct_bytes;
    made.data = taken->data.get();
    made.bytes = taken->bytes;
    made.dtype = static_cast<int32_t>(submission.spec.tensors[tensor].dtype);
    made.dimensions = static_cast<int32_t>(taken->shape.size());
    made.shape = taken->shape.data();
    made.device = taken->on_device ? taken->on_device->ordinal() : -1;
    made.owner = taken.release();
    std::memcpy(result, &made, std::min(result->struct_bytes, sizeof(made)));
    return {};
  });
}

void c_release_result(HorovodResult* result) {
  delete static_cast<OutputBuffer*>(std::exchange(result->owner, nullptr));
}

int32_t c_received_splits(HorovodOperation* operation, const int32_t** rows, size_t* count) {
  return guarded_call([&]() -> Status {
    HVD_TRY(done_of(*operation));
    *rows = operation->submission->received_splits.data();
    *count = operation->submission->received_splits.size();
    return operation->submission->status;
  });
}

int32_t c_rank(HorovodEngine* engine) {
  const std::shared_ptr<Engine> living = engine->engine.lock();
  return living ? living->rank() : -1;
}

int32_t c_tell_when_done(HorovodOperation* operation, void (*completed)(HorovodOperation*, void*), void* context) {
  int32_t told = 0;
  const int32_t code = guarded_call([&]() -> Status {
    const std::shared_ptr<Engine> engine = operation->engine.lock();
    if (!engine) return shut_down();  // the end of the engine has ended the operation
    told = engine->tell_when_done(
        operation->submission,
        [completed, context, operation](const std::shared_ptr<Submission>&) { completed(operation, context); });
    return {};
  });
  return code == HOROVOD_OK ? told : 0;
}

int32_t c_copy_on_gpu(HorovodEngine* engine, int32_t device, void* to, const void* from, size_t bytes,
                      uintptr_t stream) {
  return guarded_call([&]() -> Status {
    if (engine->process != getpid())
      return {Code::aborted, error_code::forked_child, "The engine can't be used in a forked child."};
    const std::shared_ptr<Engine> living = engine->engine.lock();
    return living ? living->copy_on_gpu(device, to, from, bytes, stream) : shut_down();
  });
}

constexpr HorovodApi kApi{HOROVOD_API_VERSION,
                          0,
                          sizeof(HorovodApi),
                          &c_last_error,
                          &c_current_engine,
                          &c_retain_engine,
                          &c_release_engine,
                          &c_submit,
                          &c_wait,
                          &c_poll,
                          &c_error_of,
                          &c_collect,
                          &c_take_result,
                          &c_release_result,
                          &c_received_splits,
                          &c_release,
                          &c_rank,
                          &c_tell_when_done,
                          &c_copy_on_gpu};

}  // namespace

const HorovodApi* horovod_api() { return &kApi; }

HorovodEngine* make_c_engine(const std::shared_ptr<Engine>& engine) {
  auto made = std::make_unique<HorovodEngine>();
  made->engine = engine;
  return made.release();
}

void set_current(HorovodEngine* engine) {
  {
    const std::lock_guard<std::mutex> lock(g_current_mutex);
    std::swap(engine, g_current);
  }
  c_release_engine(engine);
}

}  // namespace horovod
