// What the operations need of the rest of Horovod beside the engine: questions that Python answers.
#pragma once

#include <cstdint>

#include "bindings/c_client.h"

namespace horovod::tensorflow {

// As in clients/horovod/tensorflow/library.py.
enum class Question : int32_t {
  size = 0,        // of a process set
  local_size = 1,  //
  rank = 2,        //
  local_rank = 3,  //
  included = 4,    // whether this rank is in a process set
  set_number = 5,  // the engine's number of a process set, of which this rank is a member
  join = 6,        // waits for all ranks; the last one to join
  due = 7,         // whether ranks compare their weights in this step
  same = 8,        // waits for all ranks, and compares
};

struct PyObject;

// Set once, by Python, before an operation is made.
extern PyObject* answering;  // (question, about, call) -> (a StatusCode, the number, why there is none)

// Asks Python, with its lock held. If a signal handler raises meanwhile (Ctrl-C), the script gets the exception when
// the main thread is back in it. about: the id of a process set, or the number of a comparison. call: the number of the
// call of the function from which this asks.
Answer ask(Question question, int64_t about = 0, int64_t call = 0);

// For a thread that waits: runs the handlers of signals if it is Python's main thread, as only that one may. True if
// one has raised: then the caller is to return soon, and the script finds the exception.
bool interrupted();

}  // namespace horovod::tensorflow
