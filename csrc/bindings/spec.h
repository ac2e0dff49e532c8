// The Python class OpSpec: what a call says of an operation beside its name and tensors. A caller makes it once and
// passes it to each call that is alike.
#pragma once

#include <pybind11/pybind11.h>

#include "bindings/remembered.h"
#include "collectives/op_spec.h"

namespace horovod {

struct PySpec {
  OpSpec spec;  // name, tensors and device are those of each call
  ~PySpec() { Remembered<PySpec>::forget(this); }
};

// Refuses numbers that mean nothing, with Python's ValueError.
OpSpec make_spec(int type, int reduce_op, double prescale, double postscale, int root, int process_set);

// The class, the enums whose numbers Python uses, and what an operation may be at most.
void add_specs(pybind11::module_& module);

}  // namespace horovod
