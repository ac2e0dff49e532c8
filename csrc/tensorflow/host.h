// What the operations need of the rest of Horovod: the engine's table of functions, and questions that Python answers.
#pragma once

#include <cstdint>
#include <string>

#include "bindings/c_api.h"

namespace horovod::tensorflow {

// As in clients/horovod/tensorflow/library.py.
enum class Question : int32_t {
  size = 0,         // of a process set
  local_size = 1,   //
  rank = 2,         //
  local_rank = 3,   //
  included = 4,     // whether this rank is in a process set
  set_number = 5,   // the engine's number of a process set, of which this rank is a member
  join = 6,         // waits for all ranks; the last one to join
  interrupted = 7,  // whether the program was told to stop while an operation waits: 1, or 0
};

// Writes a number to `answer`, or returns a TfCode and writes a sentence. Takes Python's lock.
using Ask = int32_t (*)(int32_t question, int64_t process_set_id, int64_t* answer, char* sentence, size_t bytes);

// Set once, by Python, before an operation is made.
extern const HorovodApi* engine_api;
extern Ask ask_python;

struct Answer {
  int32_t code = 0;  // a TfCode
  int64_t number = 0;
  std::string sentence;
};
Answer ask(Question question, int64_t process_set_id = 0);

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

// The TfCode for what a function of the engine's table has returned (API: status and exception).
int tf_code(int32_t engine_code);

constexpr const char* kNotInitialized = "Horovod has not been initialized; use hvd.init().";

}  // namespace horovod::tensorflow
