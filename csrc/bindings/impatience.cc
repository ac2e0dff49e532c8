#include "bindings/impatience.h"

#include <algorithm>
#include <utility>

#include "base/clock.h"
#include "base/limits.h"

namespace py = pybind11;

namespace horovod {
namespace {

PyObject* g_function = nullptr;  // holds a reference, which is never given back, not even at the end of the process
int64_t g_waits = 0;

}  // namespace

void Impatience::set(const py::object& function) {
  PyObject* const wanted = function.is_none() ? nullptr : py::object(function).release().ptr();
  Py_XDECREF(std::exchange(g_function, wanted));
}

int64_t Impatience::slice_us(int64_t waited_us, int64_t longest_us) {
  if (!g_function) return longest_us;
  // Turns come at times that grow with the wait, so each is late by a part of the wait at most.
  return std::min(longest_us,
                  waited_us == 0 ? limits::kImpatientUs : std::max(limits::kImpatientAgainUs, waited_us / 4));
}

int64_t Impatience::slice_us(int64_t longest_us) {
  if (began_us_ == 0) began_us_ = now_us();
  return slice_us(waited_us_, longest_us);
}

void Impatience::tell(const Submission& submission) {
  // An operation that runs comes to an end without anybody's help.
  if (submission.is_done() || submission.running.load(std::memory_order_relaxed)) {
    waited_us_ = now_us() - began_us_;
  } else {
    tell(submission.spec.process_set);
  }
}

void Impatience::tell(int process_set) {
  waited_us_ = now_us() - began_us_;
  if (!g_function) return;
  if (number_ == 0) number_ = ++g_waits;
  // Another thread may set another function meanwhile.
  const auto function = py::reinterpret_borrow<py::object>(g_function);
  function(number_, waited_us_, process_set);
}

}  // namespace horovod
