#include "bindings/errors.h"

namespace py = pybind11;

namespace horovod {
namespace {

PyObject* g_internal_error = nullptr;  // set once by set_internal_error; guarded by the GIL, never freed

}  // namespace

void set_internal_error(const py::object& type) {
  Py_XDECREF(g_internal_error);
  g_internal_error = type.inc_ref().ptr();
}

void raise_status(const Status& status) {
  if (status.code() == Code::invalid_argument) throw py::value_error(status.message());
  PyErr_SetString(g_internal_error ? g_internal_error : PyExc_RuntimeError, status.message().c_str());
  throw py::error_already_set();
}

void refuse(ErrorCode error, std::string_view sentence) { throw py::value_error(coded(error, sentence)); }

}  // namespace horovod
