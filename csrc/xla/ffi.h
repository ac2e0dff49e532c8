// XLA's C interface for custom calls (typed FFI, version 0.x), as much of it as one handler needs, declared by hand.
//
// Layouts and numbers are those of xla/ffi/api/c_api.h. Each struct says its size, so a field may be added at its end.
#pragma once

#include <cstddef>
#include <cstdint>

namespace horovod::xla {

struct Error;             // XLA_FFI_Error
struct ExecutionContext;  // XLA_FFI_ExecutionContext
struct Future;            // XLA_FFI_Future: the end of a call that goes on after its handler has returned
struct Api;

struct Extension {
  size_t struct_size;
  int32_t type;
  Extension* next;
};
constexpr int32_t kMetadataExtension = 1;

struct ApiVersion {
  size_t struct_size;
  Extension* extension;
  int32_t major, minor;
};

struct Metadata {
  size_t struct_size;
  ApiVersion api_version;
  uint32_t traits;
  int64_t state_type;
};

struct MetadataExtension {
  Extension base;
  Metadata* metadata;
};

struct ErrorCreateArguments {
  size_t struct_size;
  Extension* extension;
  const char* message;
  int32_t code;  // absl::StatusCode
};

struct ErrorMessageArguments {
  size_t struct_size;
  Extension* extension;
  Error* error;
  const char* message;  // out
};

struct ByteSpan {
  const char* data;
  size_t bytes;
};

struct Buffer {
  size_t struct_size;
  Extension* extension;
  int32_t dtype;
  void* data;
  int64_t rank;
  int64_t* dimensions;
};

struct Scalar {
  int32_t dtype;
  void* value;
};

enum AttributeType : int32_t { kArray = 1, kDictionary = 2, kScalar = 3, kString = 4 };
constexpr int32_t kToken = 17;  // XLA_FFI_DataType of a buffer without memory, which only says what comes after what

struct Buffers {  // XLA_FFI_Args and XLA_FFI_Rets
  size_t struct_size;
  Extension* extension;
  int64_t count;
  int32_t* types;
  void** items;
};

struct Attributes {
  size_t struct_size;
  Extension* extension;
  int64_t count;
  int32_t* types;
  ByteSpan** names;
  void** values;
};

struct CallFrame {
  size_t struct_size;
  Extension* extension;
  const Api* api;
  ExecutionContext* context;
  int32_t stage;
  Buffers arguments, results;
  Attributes attributes;
  Future* future;  // out; null where the call has ended when the handler returns. Not counted in struct_size
};

struct FutureCreateArguments {
  size_t struct_size;
  Extension* extension;
  Future* future;  // out
};

struct FutureAvailableArguments {
  size_t struct_size;
  Extension* extension;
  Future* future;
};

struct FutureErrorArguments {
  size_t struct_size;
  Extension* extension;
  Future* future;
  Error* error;  // XLA's from then on
};

using Handler = Error* (*)(CallFrame*);

struct HandlerBundle {
  Handler instantiate, prepare, initialize, execute;
};

struct RegisterArguments {
  size_t struct_size;
  Extension* extension;
  ByteSpan name, platform;
  HandlerBundle bundle;
  uint32_t traits;
};

struct StreamArguments {
  size_t struct_size;
  Extension* extension;
  ExecutionContext* context;
  void* stream;  // out, of the platform's own kind: with CUDA a CUstream
};

struct OrdinalArguments {
  size_t struct_size;
  Extension* extension;
  ExecutionContext* context;
  int32_t ordinal;  // out, of the device
};

struct Api {
  size_t struct_size;
  Extension* extension;
  ApiVersion version;
  const void* internal;
  Error* (*create_error)(ErrorCreateArguments*);
  void (*error_message)(ErrorMessageArguments*);
  void (*destroy_error)(void*);
  Error* (*register_handler)(RegisterArguments*);
  Error* (*stream_of)(StreamArguments*);
  void* not_used[8];  // types, states, memory and threads of XLA
  Error* (*create_future)(FutureCreateArguments*);
  Error* (*set_available)(FutureAvailableArguments*);
  Error* (*set_error)(FutureErrorArguments*);
  void* not_used_either;
  Error* (*ordinal_of)(OrdinalArguments*);
};

}  // namespace horovod::xla
