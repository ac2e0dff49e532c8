// What each library of native operations needs for calls of c_api.h from C++. Such a library is not linked to the
// engine, so all of it is inline here.
#pragma once

#include <cstdint>
#include <string>

#include "bindings/c_api.h"

namespace horovod {

// Numbers of absl::StatusCode, which TF_Code and XLA's errors have as well.
enum StatusCode : int { kOk = 0, kCancelled = 1, kUnknown = 2, kInvalidArgument = 3, kFailedPrecondition = 9 };

// Numbers of OpType in protos/v1/types.proto.
enum class Collective : int32_t { allreduce = 0, allgather = 1, broadcast = 2, alltoall = 3, reducescatter = 4 };

constexpr const char* kNotInitialized =
    "Horovod has not been initialized; use hvd.init(). A child process of a rank can only ask for its rank and size. "
    "[not-initialized]";

// The answer to a question of Python, or of another part of the library.
struct Answer {
  int32_t code = 0;  // a StatusCode
  int64_t number = 0;
  std::string sentence;
};

// Set once, by Python, before an operation is made.
inline const HorovodApi* engine_api = nullptr;

// The engine of hvd.init() while it is used, or nothing.
class EngineReference {
 public:
  EngineReference() : engine_(engine_api->current_engine()) {}
  ~EngineReference() { engine_api->release_engine(engine_); }
  EngineReference(const EngineReference&) = delete;
  EngineReference& operator=(const EngineReference&) = delete;

  HorovodEngine* get() const { return engine_; }

 private:
  HorovodEngine* const engine_;
};

// The code of a Status for the number that a function of the table has returned.
inline StatusCode status_code(int32_t engine_code) {
  switch (engine_code) {
    case HOROVOD_OK:
      return kOk;
    case HOROVOD_INVALID_ARGUMENT:
      return kInvalidArgument;
    case HOROVOD_PRECONDITION:
      return kFailedPrecondition;
    default:
      return kUnknown;
  }
}

}  // namespace horovod
