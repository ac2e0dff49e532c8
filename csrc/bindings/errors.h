// Statuses and C++ exceptions become Python exceptions.
#pragma once

#include <new>
#include <stdexcept>
#include <string_view>

#include <pybind11/pybind11.h>

#include "base/status.h"

namespace horovod {

// What raise_status() raises for everything but bad arguments, which are ValueError. With the GIL.
void set_internal_error(const pybind11::object& type);

[[noreturn]] void raise_status(const Status& status);

// Raises ValueError.
[[noreturn]] void refuse(ErrorCode error, std::string_view sentence);

// Runs what a function of CPython's C API does; an exception of it becomes the pending Python exception and null.
template <typename Body>
PyObject* guarded(Body&& body) noexcept {
  try {
    return body();
  } catch (pybind11::error_already_set& error) {
    error.restore();
  } catch (const pybind11::builtin_exception& error) {
    error.set_error();
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

}  // namespace horovod
