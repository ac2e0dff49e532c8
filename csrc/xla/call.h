// What a handler reads in a call of XLA's, and how it fails.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "xla/ffi.h"

namespace horovod::xla {

constexpr int64_t kTokens = 1;  // before the tensors

inline Error* error(const Api* api, int code, const char* sentence) {
  ErrorCreateArguments arguments{sizeof(arguments), nullptr, sentence, code};
  return api->create_error(&arguments);
}

// What the call's attributes say.
class CallAttributes {
 public:
  explicit CallAttributes(const Attributes& given) : given_(given) {}

  std::string text(std::string_view name) const {
    const void* const value = find(name, kString);
    if (!value) return {};
    const auto& span = *static_cast<const ByteSpan*>(value);
    return {span.data, span.bytes};
  }
  template <typename Number>
  Number number(std::string_view name) const {
    Number number{};
    const void* const value = find(name, kScalar);
    if (value) std::memcpy(&number, static_cast<const Scalar*>(value)->value, sizeof(number));
    return number;
  }

 private:
  const void* find(std::string_view name, int32_t type) const {
    for (int64_t i = 0; i < given_.count; ++i) {
      const ByteSpan& found = *given_.names[i];
      if (std::string_view(found.data, found.bytes) == name && given_.types[i] == type) return given_.values[i];
    }
    return nullptr;
  }

  const Attributes& given_;
};

inline const Buffer& buffer(const Buffers& buffers, size_t place) {
  return *static_cast<const Buffer*>(buffers.items[place]);
}

}  // namespace horovod::xla
