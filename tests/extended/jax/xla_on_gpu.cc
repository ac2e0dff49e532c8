// Stands in for XLA where it runs a compiled function on a GPU: calls a handler as XLA does, with the structs of XLA's
// own header, and tells it the stream and the device that the test names. All arrays have one dimension, of float32.
// A process has one world in earnest; here each of its threads may have another one's engine.
#include <cstdint>
#include <string>
#include <vector>

#include "bindings/c_api.h"
#include "xla/ffi/api/c_api.h"

struct XLA_FFI_Error {
  std::string sentence;
};
struct XLA_FFI_ExecutionContext {
  void* stream;
  int32_t device;
};

namespace {

thread_local HorovodEngine* t_engine = nullptr;
const HorovodApi* g_engine_api = nullptr;

HorovodEngine* engine_of_this_thread() {
  if (t_engine) g_engine_api->retain_engine(t_engine);
  return t_engine;
}

XLA_FFI_Error* create_error(XLA_FFI_Error_Create_Args* given) { return new XLA_FFI_Error{given->message}; }

XLA_FFI_Error* get_stream(XLA_FFI_Stream_Get_Args* given) {
  given->stream = given->ctx->stream;
  return nullptr;
}

XLA_FFI_Error* get_device(XLA_FFI_DeviceOrdinal_Get_Args* given) {
  given->device_ordinal = given->ctx->device;
  return nullptr;
}

const XLA_FFI_Api& the_api() {
  static const XLA_FFI_Api made = [] {
    XLA_FFI_Api api{};
    api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
    api.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR};
    api.XLA_FFI_Error_Create = create_error;
    api.XLA_FFI_Stream_Get = get_stream;
    api.XLA_FFI_DeviceOrdinal_Get = get_device;
    return api;
  }();
  return made;
}

XLA_FFI_CallFrame frame_of(XLA_FFI_ExecutionContext* context) {
  XLA_FFI_CallFrame frame{};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = &the_api();
  frame.ctx = context;
  frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
  frame.args.struct_size = XLA_FFI_Args_STRUCT_SIZE;
  frame.rets.struct_size = XLA_FFI_Rets_STRUCT_SIZE;
  frame.attrs.struct_size = XLA_FFI_Attrs_STRUCT_SIZE;
  return frame;
}

// The handler's sentence, until this thread's next call.
const char* sentence_of(XLA_FFI_Error* error) {
  static thread_local std::string sentence;
  sentence = error ? error->sentence : "";
  delete error;
  return sentence.c_str();
}

class Attributes {
 public:
  Attributes& add(const char* name, int32_t value) { return add_scalar(name, XLA_FFI_DataType_S32, &value, 4); }
  Attributes& add(const char* name, int64_t value) { return add_scalar(name, XLA_FFI_DataType_S64, &value, 8); }
  Attributes& add(const char* name, double value) { return add_scalar(name, XLA_FFI_DataType_F64, &value, 8); }
  Attributes& add(const char* name, const char* value) {
    types_.push_back(XLA_FFI_AttrType_STRING);
    return named(name, new XLA_FFI_ByteSpan{value, std::char_traits<char>::length(value)});
  }
  void put_into(XLA_FFI_Attrs& attributes) {
    attributes.size = static_cast<int64_t>(types_.size());
    attributes.types = types_.data();
    attributes.names = names_.data();
    attributes.attrs = values_.data();
  }

 private:
  // What they point to stays until the process ends: a test makes few calls.
  Attributes& add_scalar(const char* name, XLA_FFI_DataType type, const void* value, size_t bytes) {
    types_.push_back(XLA_FFI_AttrType_SCALAR);
    auto* kept = new std::string(static_cast<const char*>(value), bytes);
    return named(name, new XLA_FFI_Scalar{type, kept->data()});
  }
  Attributes& named(const char* name, void* value) {
    names_.push_back(new XLA_FFI_ByteSpan{name, std::char_traits<char>::length(name)});
    values_.push_back(value);
    return *this;
  }

  std::vector<XLA_FFI_AttrType> types_;
  std::vector<XLA_FFI_ByteSpan*> names_;
  std::vector<void*> values_;
};

struct Tensors {
  explicit Tensors(int64_t count, void** addresses, int64_t* rows) : dimensions(rows, rows + count) {
    buffers.push_back({XLA_FFI_Buffer_STRUCT_SIZE, nullptr, XLA_FFI_DataType_TOKEN, nullptr, 0, nullptr});
    for (int64_t i = 0; i < count; ++i) {
      buffers.push_back({XLA_FFI_Buffer_STRUCT_SIZE, nullptr, XLA_FFI_DataType_F32, addresses[i], 1, &dimensions[i]});
    }
    for (XLA_FFI_Buffer& one : buffers) items.push_back(&one);
  }
  std::vector<int64_t> dimensions;
  std::vector<XLA_FFI_Buffer> buffers;
  std::vector<void*> items;
};

}  // namespace

extern "C" {

// What the library under test is to be given as the engine's functions.
const HorovodApi* xla_engine_api(const HorovodApi* real) {
  static HorovodApi made;
  g_engine_api = real;
  made = *real;
  made.current_engine = engine_of_this_thread;
  return &made;
}

// What the handler says of itself when it is registered: the traits, or -1 where it has not answered.
int64_t xla_traits_of(XLA_FFI_Handler* handler) {
  XLA_FFI_Metadata metadata{};
  metadata.struct_size = XLA_FFI_Metadata_STRUCT_SIZE;
  XLA_FFI_Metadata_Extension extension{};
  extension.extension_base = {XLA_FFI_Metadata_Extension_STRUCT_SIZE, XLA_FFI_Extension_Metadata, nullptr};
  extension.metadata = &metadata;
  XLA_FFI_CallFrame frame = frame_of(nullptr);
  frame.extension_start = &extension.extension_base;
  XLA_FFI_Error* const error = handler(&frame);
  const bool answered = !error && metadata.api_version.minor_version == XLA_FFI_API_MINOR;
  delete error;
  return answered ? static_cast<int64_t>(metadata.traits) : -1;
}

// One call with a token and `count` arrays. "" or the handler's sentence.
const char* xla_call(XLA_FFI_Handler* handler, HorovodEngine* engine, void* stream, int32_t device, const char* wire,
                     int32_t type, int64_t count, void** inputs, int64_t* rows, void** outputs, int64_t* result_rows) {
  constexpr int32_t kFloat32 = 7, kSum = 1;  // of protos/v1/types.proto
  constexpr int32_t kRoot = 1;
  t_engine = engine;
  XLA_FFI_ExecutionContext context{stream, device};
  XLA_FFI_CallFrame frame = frame_of(&context);
  Tensors given(count, inputs, rows), made(count, outputs, result_rows);
  std::vector<XLA_FFI_ArgType> argument_types(given.items.size(), XLA_FFI_ArgType_BUFFER);
  std::vector<XLA_FFI_RetType> result_types(made.items.size(), XLA_FFI_RetType_BUFFER);
  frame.args.size = frame.rets.size = static_cast<int64_t>(given.items.size());
  frame.args.types = argument_types.data();
  frame.args.args = given.items.data();
  frame.rets.types = result_types.data();
  frame.rets.rets = made.items.data();
  Attributes attributes;
  attributes.add("wire", wire)
      .add("type", type)
      .add("dtype", kFloat32)
      .add("element_bytes", int32_t{4})
      .add("process_set_id", int64_t{0})
      .add("reduce_op", kSum)
      .add("prescale_factor", 1.0)
      .add("postscale_factor", 1.0)
      .add("root_rank", kRoot)
      .put_into(frame.attrs);
  const char* const sentence = sentence_of(handler(&frame));
  t_engine = nullptr;
  return sentence;
}

}  // extern "C"
