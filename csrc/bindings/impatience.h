// Tells Python that a thread waits long for an operation.
//
// Whatever a rank waits for, another rank may be waiting for this one meanwhile: the end of its backward pass does.
// Only Python knows of that, and can say something to it (clients/horovod/common/ops/questions.py). So a wait that
// lasts calls it, again and again, on the waiting thread. One that does not last costs nothing.
#pragma once

#include <cstdint>

#include <pybind11/pybind11.h>

#include "engine/submission.h"

namespace horovod {

// One wait of one thread. The GIL guards all members.
class Impatience {
 public:
  // Called as function(number of the wait, microseconds that it has lasted, process set); None: no more. It may submit
  // operations and must not wait.
  static void set(const pybind11::object& function);

  // How long a thread that has waited `waited_us` may go on before it calls tell(), at most `longest_us`.
  static int64_t slice_us(int64_t waited_us, int64_t longest_us);
  // The same for the wait of this object, which begins with the first call.
  int64_t slice_us(int64_t longest_us);
  // How long this wait had lasted at the last tell().
  int64_t waited_us() const { return waited_us_; }
  // The slice is over and the operation is not done. What the function raises is thrown.
  void tell(const Submission& submission);
  // The same for a wait in a process set that is not for an operation.
  void tell(int process_set);

 private:
  int64_t began_us_ = 0;
  int64_t waited_us_ = 0;
  int64_t number_ = 0;  // number of this wait among all of the process; 0: the function was not called for it yet
};

}  // namespace horovod
