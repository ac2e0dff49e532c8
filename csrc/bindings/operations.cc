#include "bindings/operations.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/engine.h"
#include "bindings/errors.h"
#include "bindings/remembered.h"
#include "bindings/spec.h"
#include "bindings/tensor_reader.h"
#include "engine/waiting_thread.h"

namespace py = pybind11;

namespace horovod {
namespace {

// -- arguments --------------------------------------------------------------------------------------------------------

struct Signature {
  const char* function;
  size_t required;
  size_t count;
  const char* const* names;
};

// The object given for each parameter, or null. False: a TypeError is set.
bool bind(const Signature& signature, PyObject* const* arguments, Py_ssize_t positional, PyObject* names,
          PyObject** bound) {
  const auto given = static_cast<size_t>(positional);
  if (given > signature.count) {
    PyErr_Format(PyExc_TypeError, "%s() takes at most %zu arguments (%zu given)", signature.function, signature.count,
                 given);
    return false;
  }
  std::copy_n(arguments, given, bound);
  std::fill(bound + given, bound + signature.count, nullptr);
  const Py_ssize_t keywords = names ? PyTuple_GET_SIZE(names) : 0;
  for (Py_ssize_t i = 0; i < keywords; ++i) {
    PyObject* const name = PyTuple_GET_ITEM(names, i);
    size_t place = 0;
    while (place < signature.count && PyUnicode_CompareWithASCIIString(name, signature.names[place]) != 0) ++place;
    if (place == signature.count || bound[place]) {
      PyErr_Format(PyExc_TypeError, "%s() got %s '%U'", signature.function,
                   place == signature.count ? "an unexpected keyword argument" : "multiple values for argument", name);
      return false;
    }
    bound[place] = arguments[positional + i];
  }
  for (size_t place = 0; place < signature.required; ++place) {
    if (bound[place]) continue;
    PyErr_Format(PyExc_TypeError, "%s() is missing its argument '%s'", signature.function, signature.names[place]);
    return false;
  }
  return true;
}

py::object or_none(PyObject* value) { return value ? py::reinterpret_borrow<py::object>(value) : py::none(); }

// The parameters that submit and run have in common, in their order; submit has more behind them.
enum : size_t { kSpec, kName, kTensors, kKeep, kReader, kSplits, kCommon };

const TensorReader* reader_of(PyObject* given) {
  return given && given != Py_None ? &Remembered<TensorReader>::of(given) : nullptr;
}

// watch: the owners are to tell at the end whether the memory is still theirs.
std::shared_ptr<Submission> make_submission(PyObject* const* given, bool watch, Owners& owners) {
  auto submission = std::make_shared<Submission>();
  OpSpec& spec = submission->spec;
  spec.set_arguments(Remembered<PySpec>::of(given[kSpec]).spec);
  if (!PyUnicode_Check(given[kName]))
    throw py::type_error(coded(error_code::invalid_operation, "The name of an operation must be a str."));
  Py_ssize_t length = 0;
  const char* const name = PyUnicode_AsUTF8AndSize(given[kName], &length);
  if (!name) throw py::error_already_set();
  spec.name.assign(name, static_cast<size_t>(length));
  const auto tensors =
      py::reinterpret_steal<py::object>(PySequence_Fast(given[kTensors], "tensors must be a sequence"));
  if (!tensors) throw py::error_already_set();
  const TensorReader* const reader = reader_of(given[kReader]);
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(tensors.ptr());
  spec.tensors.reserve(static_cast<size_t>(count));
  submission->spans.reserve(static_cast<size_t>(count));
  owners.expect(static_cast<size_t>(count));
  try {
    for (Py_ssize_t i = 0; i < count; ++i) {
      add_tensor(PySequence_Fast_GET_ITEM(tensors.ptr(), i), reader, watch, *submission, owners);
    }
  } catch (const py::error_already_set& refusal) {  // the framework's own message names no operation
    if (!refusal.matches(PyExc_ValueError) || spec.name.find(".noname") != std::string::npos) throw;
    throw py::value_error(
        with_more(py::str(refusal.value()).cast<std::string>(), " It was given as '" + spec.name + "'."));
  }
  if (given[kSplits] && given[kSplits] != Py_None) {
    submission->splits = py::handle(given[kSplits]).cast<std::vector<int32_t>>();
  }
  return submission;
}

// -- handles ----------------------------------------------------------------------------------------------------------

// An operation in flight. It ends when result() has returned or raised what became of it; a signal's handler that
// raises meanwhile leaves it as it was. Members are guarded by the GIL.
struct Handle {
  PyObject_HEAD PyObject* owner;  // the Python Engine that started it
  PyEngine* engine;
  std::shared_ptr<Submission> submission;  // null: the handle has ended
  Owners owners;
  py::object keep;
  py::object finish;
  py::object reader;  // null: none
};

PyTypeObject* g_handle_type = nullptr;  // set once, when the module is made

Handle& handle_of(PyObject* self) { return *reinterpret_cast<Handle*>(self); }

PyObject* new_handle(PyObject* owner, PyEngine& engine, std::shared_ptr<Submission> submission, Owners owners,
                     py::object keep, py::object finish, py::object reader) {
  auto* const handle = PyObject_New(Handle, g_handle_type);
  if (!handle) throw py::error_already_set();
  Py_INCREF(owner);
  handle->owner = owner;
  handle->engine = &engine;
  new (&handle->submission) std::shared_ptr<Submission>(std::move(submission));
  new (&handle->owners) Owners(std::move(owners));
  new (&handle->keep) py::object(std::move(keep));
  new (&handle->finish) py::object(std::move(finish));
  new (&handle->reader) py::object(std::move(reader));
  return reinterpret_cast<PyObject*>(handle);
}

void delete_handle(PyObject* self) {
  const py::error_scope pending;
  Handle& handle = handle_of(self);
  try {
    if (handle.submission) {
      handle.engine->abandon(std::move(handle.submission), bundle(std::move(handle.keep), handle.owners));
    }
  } catch (const std::exception&) {
    PyErr_WriteUnraisable(handle.owner);
  }
  std::destroy_at(&handle.submission);
  std::destroy_at(&handle.owners);
  std::destroy_at(&handle.keep);
  std::destroy_at(&handle.finish);
  std::destroy_at(&handle.reader);
  Py_DECREF(handle.owner);
  PyTypeObject* const type = Py_TYPE(self);
  PyObject_Free(self);
  Py_DECREF(type);
}

PyObject* done(PyObject* self, PyObject*) {
  return guarded([&] {
    const Handle& handle = handle_of(self);
    if (!handle.submission) {
      refuse(error_code::cleared_handle, "The handle was not created or has been cleared: it was synchronized before.");
    }
    WaitingThread::count();
    return PyBool_FromLong(handle.engine->over(*handle.submission));
  });
}

// The GPU of its tensors; none if the tensors are in the host's memory, and after the end.
PyObject* device(PyObject* self, void*) {
  const Handle& handle = handle_of(self);
  if (!handle.submission || !handle.submission->on_device) Py_RETURN_NONE;
  return PyLong_FromLong(handle.submission->on_device->ordinal);
}

PyObject* result(PyObject* self, PyObject* const* arguments, Py_ssize_t positional, PyObject* names) {
  static constexpr const char* kNames[] = {"stream"};
  static constexpr Signature kSignature{"result", 0, 1, kNames};
  PyObject* bound[1];
  if (!bind(kSignature, arguments, positional, names, bound)) return nullptr;
  return guarded([&]() -> PyObject* {
    std::optional<uintptr_t> stream;
    if (bound[0] && bound[0] != Py_None) {
      stream = PyLong_AsSize_t(bound[0]);
      if (PyErr_Occurred()) throw py::error_already_set();
    }
    Handle& handle = handle_of(self);
    const std::shared_ptr<Submission> submission = handle.submission;
    if (!submission) Py_RETURN_NONE;
    handle.engine->await(*submission);
    if (!handle.submission) Py_RETURN_NONE;  // another thread has ended it meanwhile
    handle.submission.reset();
    py::object keep = std::move(handle.keep);
    const Owners owners = std::move(handle.owners);
    const py::object finish = std::move(handle.finish);
    const TensorReader* const reader = reader_of(handle.reader.ptr());
    py::object received = handle.engine->result_of(submission, stream, keep, owners, reader);
    if (reader) reader->check_unmoved(owners, submission->spec.name);
    if (finish && !finish.is_none()) return finish(std::move(received)).release().ptr();
    return (keep.is_none() ? received : keep).release().ptr();
  });
}

// -- Engine -----------------------------------------------------------------------------------------------------------

PyObject* submit(PyObject* self, PyObject* const* arguments, Py_ssize_t positional, PyObject* names) {
  enum : size_t { kFinish = kCommon, kWaitFollows, kUnawaited, kCount };
  static constexpr const char* kNames[kCount] = {"spec",   "name",   "tensors",      "keep",     "reader",
                                                 "splits", "finish", "wait_follows", "unawaited"};
  static constexpr Signature kSignature{"submit", 3, kCount, kNames};
  PyObject* given[kCount];
  if (!bind(kSignature, arguments, positional, names, given)) return nullptr;
  return guarded([&] {
    auto& engine = Remembered<PyEngine>::of(self);
    Owners owners;
    std::shared_ptr<Submission> submission = make_submission(given, true, owners);
    const int wait_follows = given[kWaitFollows] ? PyObject_IsTrue(given[kWaitFollows]) : 0;
    const int unawaited = given[kUnawaited] ? PyObject_IsTrue(given[kUnawaited]) : 0;
    if (wait_follows < 0 || unawaited < 0) throw py::error_already_set();
    submission->unawaited = unawaited != 0;
    engine.start(submission, wait_follows != 0 ? Start::by_waiter : Start::gathered);
    return new_handle(self, engine, std::move(submission), std::move(owners), or_none(given[kKeep]),
                      or_none(given[kFinish]), py::reinterpret_borrow<py::object>(given[kReader]));
  });
}

PyObject* run(PyObject* self, PyObject* const* arguments, Py_ssize_t positional, PyObject* names) {
  static constexpr const char* kNames[kCommon] = {"spec", "name", "tensors", "keep", "reader", "splits"};
  static constexpr Signature kSignature{"run", 3, kCommon, kNames};
  PyObject* given[kCommon];
  if (!bind(kSignature, arguments, positional, names, given)) return nullptr;
  return guarded([&] {
    auto& engine = Remembered<PyEngine>::of(self);
    Owners owners;
    const std::shared_ptr<Submission> submission = make_submission(given, false, owners);
    const py::object keep = or_none(given[kKeep]);
    engine.start_and_wait(submission);
    try {
      engine.await(*submission);
    } catch (const py::error_already_set&) {
      engine.abandon(submission, bundle(keep, owners));
      throw;
    }
    return engine.result_of(submission, std::nullopt, keep, owners, reader_of(given[kReader])).release().ptr();
  });
}

template <typename Function>
PyCFunction c_function(Function* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));  // as CPython's own macro does it
}

PyMethodDef g_engine_methods[] = {
    {"submit", c_function(&submit), METH_FASTCALL | METH_KEYWORDS, "Starts an operation; see _core.pyi."},
    {"run", c_function(&run), METH_FASTCALL | METH_KEYWORDS, "submit() and result() in one; see _core.pyi."},
};
PyMethodDef g_handle_methods[] = {
    {"done", c_function(&done), METH_NOARGS, "Whether result() would return at once."},
    {"result", c_function(&result), METH_FASTCALL | METH_KEYWORDS, "Waits for the end; see _core.pyi."},
    {nullptr, nullptr, 0, nullptr},
};
PyGetSetDef g_handle_members[] = {
    {"device", &device, nullptr, "The GPU that its tensors are on, or None.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

}  // namespace

void add_operations(py::module_& module, const py::handle& engine) {
  PyType_Slot slots[] = {
      {Py_tp_dealloc, reinterpret_cast<void*>(&delete_handle)},
      {Py_tp_methods, g_handle_methods},
      {Py_tp_getset, g_handle_members},
      {0, nullptr},
  };
  PyType_Spec spec{"horovod._core.Handle", sizeof(Handle), 0,
                   Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE, slots};
  const auto type = py::reinterpret_steal<py::object>(PyType_FromSpec(&spec));
  if (!type) throw py::error_already_set();
  module.attr("Handle") = type;
  g_handle_type = reinterpret_cast<PyTypeObject*>(py::object(type).release().ptr());  // for ever
  for (PyMethodDef& method : g_engine_methods) {
    const auto function =
        py::reinterpret_steal<py::object>(PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(engine.ptr()), &method));
    if (!function) throw py::error_already_set();
    engine.attr(method.ml_name) = function;
  }
}

}  // namespace horovod
