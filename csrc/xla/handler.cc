#include "xla/handler.h"

#include <cstddef>
#include <cstring>
#include <memory>
#include <vector>

#include "xla/call.h"

namespace horovod::xla {
namespace {

constexpr int64_t kForEver = -1;

Host g_host;

// -- where a call's tensors are ---------------------------------------------------------------------------------------
class Place {
 public:
  // What XLA says of the device that runs the call. An error where it says nothing.
  Error* find(const CallFrame& frame) {
    const Api& api = *frame.api;
    if (api.struct_size < sizeof(Api)) return error(&api, kFailedPrecondition, g_host.other_version);
    StreamArguments stream{sizeof(stream), nullptr, frame.context, nullptr};
    if (Error* const failed = api.stream_of(&stream)) return failed;
    OrdinalArguments device{sizeof(device), nullptr, frame.context, 0};
    if (Error* const failed = api.ordinal_of(&device)) return failed;
    device_ = device.ordinal;
    stream_ = reinterpret_cast<uintptr_t>(stream.stream);
    return nullptr;
  }
  bool on_gpu() const { return device_ >= 0; }
  int32_t device() const { return device_; }
  uintptr_t stream() const { return stream_; }

  // On a GPU it is queued, and the engine's last_error() says why it could not be.
  int32_t copy(HorovodEngine* engine, void* to, const void* from, size_t bytes) const {
    if (bytes == 0 || to == from) return HOROVOD_OK;
    if (on_gpu()) return engine_api->copy_on_gpu(engine, device_, to, from, bytes, stream_);
    std::memcpy(to, from, bytes);
    return HOROVOD_OK;
  }

 private:
  int32_t device_ = -1;  // the host's memory
  uintptr_t stream_ = 0;
};

// -- one call ---------------------------------------------------------------------------------------------------------
size_t bytes_of(const Buffer& tensor, int64_t element_bytes) {
  int64_t elements = 1;
  for (int64_t i = 0; i < tensor.rank; ++i) elements *= tensor.dimensions[i];
  return static_cast<size_t>(elements * element_bytes);
}

struct Running {
  const CallFrame& frame;
  const Place& place;
  HorovodEngine* engine;
  HorovodOperation* operation;
  int64_t element_bytes;

  Error* engine_error(int32_t code) const { return error(frame.api, status_code(code), engine_api->last_error()); }

  // From memory of the engine. An error where the result has another shape than XLA was told of.
  Error* give_result(size_t number, const Buffer& into) const {
    HorovodResult result{};
    result.struct_bytes = sizeof(result);
    if (const int32_t code = engine_api->take_result(operation, number, &result); code != HOROVOD_OK) {
      return engine_error(code);
    }
    Error* failed = nullptr;
    if (result.bytes != bytes_of(into, element_bytes)) {
      failed = error(frame.api, kFailedPrecondition, g_host.rows_differ);
    } else if (const int32_t code = place.copy(engine, into.data, result.data, result.bytes); code != HOROVOD_OK) {
      failed = engine_error(code);
    }
    engine_api->release_result(&result);  // on a GPU it stays until the stream has come to here
    return failed;
  }

  Error* give_results(Collective type) const {
    const int32_t code = engine_api->wait(operation, kForEver);
    if (code != HOROVOD_OK) return error(frame.api, status_code(code), engine_api->error_of(operation));
    if (place.on_gpu()) {
      const int32_t collected = engine_api->collect(operation, place.stream());
      if (collected != HOROVOD_OK) return engine_error(collected);
    }
    if (type == Collective::allreduce || type == Collective::broadcast) return nullptr;
    for (int64_t i = kTokens; i < frame.results.count; ++i) {
      Error* const failed = give_result(static_cast<size_t>(i - kTokens), buffer(frame.results, i));
      if (failed) return failed;
    }
    return nullptr;
  }
};

// -- a call that goes on after its handler has returned ---------------------------------------------------------------
struct Pending {
  const Api* api;
  Future* future;

  // The last use of it. XLA may go on with the compiled function in this thread before it returns.
  void end(Error* failed) const {
    if (failed) {
      FutureErrorArguments arguments{sizeof(arguments), nullptr, future, failed};
      (void)api->set_error(&arguments);
    } else {
      FutureAvailableArguments arguments{sizeof(arguments), nullptr, future};
      (void)api->set_available(&arguments);
    }
  }
};

void completed(HorovodOperation* operation, void* context) {
  const std::unique_ptr<const Pending> pending(static_cast<const Pending*>(context));
  const int32_t code = engine_api->wait(operation, 0);
  const char* const sentence = engine_api->error_of(operation);
  Error* const failed = code == HOROVOD_OK ? nullptr : error(pending->api, status_code(code), sentence);
  engine_api->release(operation);
  pending->end(failed);
}

// The field for the future came with the functions; the size that XLA says of a call frame leaves it out.
bool has_futures(const Api& api) { return api.struct_size >= offsetof(Api, set_error) + sizeof(api.set_error); }

// XLA keeps the memory of the call's tensors, and runs what needs none of its results, until the future has ended.
Error* leave_to_engine(CallFrame& frame, HorovodEngine* engine, HorovodCall& call) {
  FutureCreateArguments made{sizeof(made), nullptr, nullptr};
  if (Error* const failed = frame.api->create_future(&made)) return failed;
  frame.future = made.future;
  auto pending = std::make_unique<const Pending>(Pending{frame.api, made.future});
  call.completed = &completed;
  call.context = const_cast<Pending*>(pending.get());
  call.starts_at_once = 1;
  const int32_t code = engine_api->submit(engine, &call, nullptr);
  if (code == HOROVOD_OK) {
    (void)pending.release();  // it is that of completed(), which may have run
  } else {
    pending->end(error(frame.api, status_code(code), engine_api->last_error()));
  }
  return nullptr;
}

Error* run_call(CallFrame& frame, const Place& place) {
  const CallAttributes attributes(frame.attributes);
  const std::string name = attributes.text("wire");
  const auto type = static_cast<Collective>(attributes.number<int32_t>("type"));
  const auto dtype = attributes.number<int32_t>("dtype");
  const auto element_bytes = attributes.number<int32_t>("element_bytes");
  const bool fills_results = type == Collective::allreduce || type == Collective::broadcast;
  const EngineReference engine;
  if (!engine.get()) {
    const Answer why = g_host.set_number(0);
    return error(frame.api, kFailedPrecondition, why.code == kOk ? kNotInitialized : why.sentence.c_str());
  }

  HorovodCall call{};
  call.struct_bytes = sizeof(call);
  if (const auto id = attributes.number<int64_t>("process_set_id"); id != 0) {
    const Answer answer = g_host.set_number(id);
    if (answer.code != kOk) return error(frame.api, answer.code, answer.sentence.c_str());
    call.process_set = static_cast<int32_t>(answer.number);
  }
  const auto copy = [&](void* to, const void* from, size_t bytes) {
    const int32_t code = place.copy(engine.get(), to, from, bytes);
    return code == HOROVOD_OK ? nullptr : error(frame.api, status_code(code), engine_api->last_error());
  };
  if (const Buffer& token = buffer(frame.arguments, 0); token.dtype != kToken) {
    if (Error* const failed = copy(buffer(frame.results, 0).data, token.data, sizeof(int32_t))) return failed;
  }
  std::vector<HorovodTensor> spans;
  for (int64_t i = kTokens; i < frame.results.count; ++i) {
    const Buffer& input = buffer(frame.arguments, i);
    void* const output = fills_results ? buffer(frame.results, i).data : nullptr;
    const void* from = input.data;
    if (type == Collective::broadcast) {  // the engine broadcasts in place
      if (Error* const failed = copy(output, from, bytes_of(input, element_bytes))) return failed;
      from = output;
    }
    spans.push_back({from, output, dtype, static_cast<int32_t>(input.rank), input.dimensions});
  }
  call.name = name.c_str();
  call.type = static_cast<int32_t>(type);
  call.reduce_op = attributes.number<int32_t>("reduce_op");
  call.prescale = attributes.number<double>("prescale_factor");
  call.postscale = attributes.number<double>("postscale_factor");
  call.root = attributes.number<int32_t>("root_rank");
  call.tensors = spans.data();
  call.tensor_count = spans.size();
  call.tensor_bytes = sizeof(HorovodTensor);
  call.device = place.device();
  call.stream = place.stream();
  if (attributes.number<int32_t>("asynchronous") != 0 && fills_results && !place.on_gpu() && has_futures(*frame.api)) {
    return leave_to_engine(frame, engine.get(), call);
  }
  call.waits_next = 1;
  HorovodOperation* operation = nullptr;
  const int32_t code = engine_api->submit(engine.get(), &call, &operation);
  if (code != HOROVOD_OK) return error(frame.api, status_code(code), engine_api->last_error());
  Error* const failed = Running{frame, place, engine.get(), operation, element_bytes}.give_results(type);
  engine_api->release(operation);
  return failed;
}

// XLA first asks which version a handler was made for. Then this is not null.
MetadataExtension* question(const CallFrame& frame) {
  for (Extension* one = frame.extension; one; one = one->next) {
    if (one->type == kMetadataExtension) return reinterpret_cast<MetadataExtension*>(one);
  }
  return nullptr;
}

Error* answer(const CallFrame& frame, MetadataExtension& question) {
  if (frame.api->version.major != 0) return error(frame.api, kFailedPrecondition, g_host.other_version);
  Metadata& metadata = *question.metadata;
  metadata.api_version.major = frame.api->version.major;  // what we use of it is alike in all 0.x
  metadata.api_version.minor = frame.api->version.minor;
  metadata.traits = 0;
  return nullptr;
}

template <Platform platform>
Error* handle(CallFrame* frame) {
  if (MetadataExtension* const asked = question(*frame)) return answer(*frame, *asked);
  Place place;
  if constexpr (platform == Platform::cuda) {
    if (Error* const failed = place.find(*frame)) return failed;
  }
  return run_call(*frame, place);
}

}  // namespace

bool asks_for_version(const CallFrame& frame) { return question(frame) != nullptr; }

Error* do_nothing(CallFrame* frame) {
  MetadataExtension* const asked = question(*frame);
  return asked ? answer(*frame, *asked) : nullptr;
}

Handler handler_for(const Host& host, Platform platform) {
  g_host = host;
  return platform == Platform::cuda ? &handle<Platform::cuda> : &handle<Platform::host>;
}

std::string register_handler(const Api* api, const Host& host) {
  if (api->version.major != 0) return host.other_version;
  RegisterArguments arguments{};
  arguments.struct_size = sizeof(arguments);
  arguments.name = {"horovod", 7};
  arguments.platform = {"Host", 4};
  arguments.bundle.execute = handler_for(host, Platform::host);
  Error* const failed = api->register_handler(&arguments);
  if (!failed) return "";
  ErrorMessageArguments said{sizeof(said), nullptr, failed, nullptr};
  api->error_message(&said);
  return said.message;
}

}  // namespace horovod::xla
