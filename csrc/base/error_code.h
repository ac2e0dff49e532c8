// An error's code: what kind of fault it is, as a word that programs, tests and the documentation name. The words and
// their meanings are those of base/errors in Python, which a test compares with these.
#pragma once

#include <string>
#include <string_view>

namespace horovod {

struct ErrorCode {
  std::string_view word;
};

namespace error_code {

inline constexpr ErrorCode internal{"internal"};
inline constexpr ErrorCode peer_lost{"peer-lost"};
inline constexpr ErrorCode shut_down{"shut-down"};

}  // namespace error_code

// The sentence with the code behind it, as coded() in Python.
inline std::string coded(ErrorCode code, std::string sentence) {
  sentence += " [";
  sentence += code.word;
  sentence += ']';
  return sentence;
}

}  // namespace horovod
