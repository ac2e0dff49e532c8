// The answer of everything that can fail. The code says whose fault it is, the message is a whole sentence for a
// person.
#pragma once

#include <string>
#include <utility>

#include "base/error_code.h"

namespace horovod {

enum class Code : unsigned char {
  ok,
  invalid_argument,  // this call was wrong; the engine stays usable
  precondition,      // the ranks do not agree on this operation; the engine stays usable
  aborted,           // a peer is lost, or the world was shut down; this world ends
  left,              // a peer left in order; what needs it fails, what does not goes on
  timeout,           // a peer did not progress in time; this world ends
  interrupted,       // a signal asked this process to stop
  internal,          // our bug, or the operating system refused something
};

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}
  // The message holds the sentence, with the code of `error` behind it.
  Status(Code code, ErrorCode error, std::string_view sentence) : code_(code), message_(coded(error, sentence)) {}

  bool ok() const { return code_ == Code::ok; }
  Code code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  Code code_ = Code::ok;
  std::string message_;
};

}  // namespace horovod

// Returns early with the first failure.
#define HVD_TRY(expression)                      \
  do {                                           \
    ::horovod::Status hvd_status = (expression); \
    if (!hvd_status.ok()) [[unlikely]]           \
      return hvd_status;                         \
  } while (0)
