// The collectives inside of what XLA compiles (jit_compile=True): one custom call, "horovod", whose attributes say
// which.
//
// XLA knows all shapes when it compiles, and its program has one order, which is that of every rank that compiled the
// same function. So the handler waits, and works for the engine meanwhile, as an eager call does.
#include <dlfcn.h>

#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "tensorflow/collective.h"
#include "tensorflow/host.h"
#include "tensorflow/xla_ffi.h"

namespace horovod::tensorflow {
namespace {

constexpr const char* kXla = "libtensorflow_cc.so.2";
// The second is the same in C++, which is all that some builds export.
constexpr const char* kGetApi[] = {"XLA_FFI_GetApi", "_ZN3xla3ffi12GetXlaFfiApiEv"};
constexpr int64_t kForEver = -1;

std::string g_xla_obstacle;
const xla::Api* g_xla = nullptr;

xla::Error* error(const xla::Api* api, int code, const char* sentence) {
  xla::ErrorCreateArguments arguments{sizeof(arguments), nullptr, sentence, code};
  return api->create_error(&arguments);
}

// -- what the call's attributes say -----------------------------------------------------------------------------------
class CallAttributes {
 public:
  explicit CallAttributes(const xla::Attributes& given) : given_(given) {}

  std::string text(std::string_view name) const {
    const void* const value = find(name, xla::kString);
    if (!value) return {};
    const auto& span = *static_cast<const xla::ByteSpan*>(value);
    return {span.data, span.bytes};
  }
  template <typename Number>
  Number number(std::string_view name) const {
    Number number{};
    const void* const value = find(name, xla::kScalar);
    if (value) std::memcpy(&number, static_cast<const xla::Scalar*>(value)->value, sizeof(number));
    return number;
  }

 private:
  const void* find(std::string_view name, int32_t type) const {
    for (int64_t i = 0; i < given_.count; ++i) {
      const xla::ByteSpan& found = *given_.names[i];
      if (std::string_view(found.data, found.bytes) == name && given_.types[i] == type) return given_.values[i];
    }
    return nullptr;
  }

  const xla::Attributes& given_;
};

const xla::Buffer& buffer(const xla::Buffers& buffers, size_t place) {
  return *static_cast<const xla::Buffer*>(buffers.items[place]);
}

// -- one call ---------------------------------------------------------------------------------------------------------
size_t bytes_of(const xla::Buffer& tensor, int64_t element_bytes) {
  int64_t elements = 1;
  for (int64_t i = 0; i < tensor.rank; ++i) elements *= tensor.dimensions[i];
  return static_cast<size_t>(elements * element_bytes);
}

// False where the engine's result has another shape than XLA was told of.
bool give_result(HorovodOperation* operation, size_t place, const xla::Buffer& into, int64_t element_bytes) {
  HorovodResult result{};
  result.struct_bytes = sizeof(result);
  if (engine_api->take_result(operation, place, &result) != HOROVOD_OK) return false;
  const bool fits = result.bytes == bytes_of(into, element_bytes);
  if (fits && result.bytes > 0) std::memcpy(into.data, result.data, result.bytes);
  engine_api->release_result(&result);
  return fits;
}

xla::Error* give_results(const xla::CallFrame& frame, HorovodOperation* operation, Collective type,
                         int64_t element_bytes) {
  const int32_t code = engine_api->wait(operation, kForEver);
  if (code != HOROVOD_OK) return error(frame.api, tf_code(code), engine_api->error_of(operation));
  if (type == Collective::allreduce || type == Collective::broadcast) return nullptr;
  for (int64_t i = 0; i < frame.results.count; ++i) {
    if (give_result(operation, static_cast<size_t>(i), buffer(frame.results, i), element_bytes)) continue;
    return error(frame.api, kTfFailedPrecondition,
                 "XLA needs to know the shape of a result when it compiles, so with jit_compile=True all ranks must "
                 "give the same number of rows. Use jit_compile=False where they do not.");
  }
  return nullptr;
}

xla::Error* run_call(const xla::CallFrame& frame) {
  const CallAttributes attributes(frame.attributes);
  const std::string name = attributes.text("wire");
  const auto type = static_cast<Collective>(attributes.number<int32_t>("type"));
  const auto dtype = attributes.number<int32_t>("dtype");
  const auto element_bytes = attributes.number<int32_t>("element_bytes");
  const bool fills_results = type == Collective::allreduce || type == Collective::broadcast;
  const EngineReference engine;
  if (!engine.get()) return error(frame.api, kTfFailedPrecondition, kNotInitialized);

  HorovodCall call{};
  call.struct_bytes = sizeof(call);
  if (const auto id = attributes.number<int64_t>("process_set_id"); id != 0) {
    const Answer answer = ask(Question::set_number, id);
    if (answer.code != kTfOk) return error(frame.api, answer.code, answer.sentence.c_str());
    call.process_set = static_cast<int32_t>(answer.number);
  }
  std::vector<HorovodTensor> spans;
  for (int64_t i = 0; i < frame.results.count; ++i) {
    const xla::Buffer& input = buffer(frame.arguments, i);
    void* const output = fills_results ? buffer(frame.results, i).data : nullptr;
    const void* from = input.data;
    if (type == Collective::broadcast) {  // the engine broadcasts in place
      if (output != from) std::memcpy(output, from, bytes_of(input, element_bytes));
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
  call.device = -1;
  call.waits_next = 1;
  HorovodOperation* operation = nullptr;
  const int32_t code = engine_api->submit(engine.get(), &call, &operation);
  if (code != HOROVOD_OK) return error(frame.api, tf_code(code), engine_api->last_error());
  xla::Error* const failed = give_results(frame, operation, type, element_bytes);
  engine_api->release(operation);
  return failed;
}

xla::Error* handle(xla::CallFrame* frame) {
  // XLA first asks which version the handler was made for.
  for (xla::Extension* one = frame->extension; one; one = one->next) {
    if (one->type != xla::kMetadataExtension) continue;
    xla::Metadata& metadata = *reinterpret_cast<xla::MetadataExtension*>(one)->metadata;
    metadata.api_version.major = g_xla->version.major;  // what we use of it is alike in all 0.x
    metadata.api_version.minor = g_xla->version.minor;
    metadata.traits = 0;
    return nullptr;
  }
  return run_call(*frame);
}

std::string register_with_xla() {
  void* const library = dlopen(kXla, RTLD_NOLOAD | RTLD_LAZY);
  const xla::Api* (*get_api)() = nullptr;
  for (const char* const name : kGetApi) {
    if (library && !get_api) get_api = reinterpret_cast<decltype(get_api)>(dlsym(library, name));
  }
  if (!get_api) return "This TensorFlow offers no XLA custom calls.";
  g_xla = get_api();
  if (g_xla->version.major != 0) return "This TensorFlow has another version of XLA's custom calls.";
  xla::RegisterArguments arguments{};
  arguments.struct_size = sizeof(arguments);
  arguments.name = {"horovod", 7};
  arguments.platform = {"Host", 4};
  arguments.bundle.execute = &handle;
  xla::Error* const failed = g_xla->register_handler(&arguments);
  if (!failed) return "";
  xla::ErrorMessageArguments said{sizeof(said), nullptr, failed, nullptr};
  g_xla->error_message(&said);
  return said.message;
}

}  // namespace
}  // namespace horovod::tensorflow

// Why XLA can't call the collectives; "" if it can.
extern "C" __attribute__((visibility("default"))) const char* horovod_tensorflow_register_xla(void) {
  using namespace horovod::tensorflow;
  g_xla_obstacle = register_with_xla();
  return g_xla_obstacle.c_str();
}
