// The part of Python's C API that is needed to call a function and to notice signals. Its functions are looked up in
// the process, so nothing is linked, and one library works with all versions of Python.
//
// A callback of ctypes would not do: Python runs signal handlers at the beginning of a function, and ctypes prints and
// drops an exception (Ctrl-C) that a handler raises there.
#pragma once

namespace horovod::tensorflow {

struct PyObject;

#define HOROVOD_PYTHON_FUNCTIONS(FUNCTION)                                  \
  FUNCTION(int, PyGILState_Ensure, ())                                      \
  FUNCTION(void, PyGILState_Release, (int))                                 \
  FUNCTION(int, PyErr_CheckSignals, ())                                     \
  FUNCTION(void, PyErr_Fetch, (PyObject**, PyObject**, PyObject**))         \
  FUNCTION(void, PyErr_Restore, (PyObject*, PyObject*, PyObject*))          \
  FUNCTION(int, Py_AddPendingCall, (int (*)(void*), void*))                 \
  FUNCTION(PyObject*, PyObject_CallFunction, (PyObject*, const char*, ...)) \
  FUNCTION(int, PyArg_ParseTuple, (PyObject*, const char*, ...))            \
  FUNCTION(void, Py_DecRef, (PyObject*))

struct PythonApi {
#define HOROVOD_PYTHON_DECLARE(returns, name, arguments) returns(*name) arguments = nullptr;
  HOROVOD_PYTHON_FUNCTIONS(HOROVOD_PYTHON_DECLARE)
#undef HOROVOD_PYTHON_DECLARE
};

extern PythonApi python;

// Why Python can't be asked; "" if it can.
const char* load_python();

}  // namespace horovod::tensorflow
