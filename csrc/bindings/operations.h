// The calls of every operation: Engine.submit, Engine.run and the class Handle.
//
// They are written against CPython's calling convention itself: between a training loop and a small tensor they are
// most of what there is, and pybind11's dispatcher alone takes longer than the rest of them.
#pragma once

#include <pybind11/pybind11.h>

namespace horovod {

// engine: the Python class Engine.
void add_operations(pybind11::module_& module, const pybind11::handle& engine);

}  // namespace horovod
