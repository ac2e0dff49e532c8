#include "tensorflow/host.h"

#include <sys/syscall.h>
#include <unistd.h>

#include "base/error_code.h"
#include "tensorflow/python_api.h"
#include "tensorflow/tf_api.h"

namespace horovod::tensorflow {

PyObject* answering = nullptr;

namespace {

// A handler may raise on the way to each answer. More in a row than this are no signals of a person.
constexpr int kTries = 8;

class PythonLock {
 public:
  PythonLock() : state_(python.PyGILState_Ensure()) {}
  ~PythonLock() { python.PyGILState_Release(state_); }
  PythonLock(const PythonLock&) = delete;
  PythonLock& operator=(const PythonLock&) = delete;

 private:
  const int state_;
};

struct Exception {
  PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;

  static Exception taken() {
    Exception found;
    python.PyErr_Fetch(&found.type, &found.value, &found.traceback);
    return found;
  }
  void drop() const {
    for (PyObject* const part : {type, value, traceback}) {
      if (part) python.Py_DecRef(part);
    }
  }
};

// What handlers have raised: only the main thread runs them, so it alone uses these, under Python's lock.
Exception g_for_the_script;  // to be raised by the next Python that it runs
Exception g_for_the_caller;  // of the operation that it waited for

int restore(Exception& kept) {
  if (!kept.type) return 0;
  python.PyErr_Restore(kept.type, kept.value, kept.traceback);
  kept = {};
  return -1;
}

int raise_in_the_script(void*) { return restore(g_for_the_script); }

bool on_main_thread() { return syscall(SYS_gettid) == getpid(); }

void keep(Exception& place, Exception raised) {
  place.drop();
  place = raised;
}

}  // namespace

Answer ask(Question question, int64_t about, int64_t call) {
  const PythonLock lock;
  Answer answer{kCancelled, 0, coded(error_code::interrupted, "Interrupted by a signal.")};
  Exception raised;
  for (int i = 0; i < kTries; ++i) {
    PyObject* const given = python.PyObject_CallFunction(answering, "iLL", static_cast<int>(question),
                                                         static_cast<long long>(about), static_cast<long long>(call));
    if (!given) {
      raised.drop();
      raised = Exception::taken();
      continue;
    }
    int code = 0;
    long long number = 0;
    const char* sentence = "";
    python.PyArg_ParseTuple(given, "iLs", &code, &number, &sentence);
    answer = {code, number, sentence};
    python.Py_DecRef(given);
    break;
  }
  if (!raised.type) return answer;
  if (on_main_thread() && python.Py_AddPendingCall(&raise_in_the_script, nullptr) == 0) {
    keep(g_for_the_script, raised);
  } else {
    raised.drop();
  }
  return answer;
}

bool interrupted() {
  if (!on_main_thread()) return false;
  const PythonLock lock;
  if (!g_for_the_script.type) {
    if (python.PyErr_CheckSignals() == 0) return false;
    keep(g_for_the_script, Exception::taken());
  }
  // Not by a pending call: TensorFlow makes its error by calling Python, where that would be raised, too early.
  keep(g_for_the_caller, g_for_the_script);
  g_for_the_script = {};
  return true;
}

}  // namespace horovod::tensorflow

// For Python with its lock: raises what has interrupted the operation that has failed, if something has.
extern "C" __attribute__((visibility("default"))) void horovod_tensorflow_raise_interrupt(void) {
  horovod::tensorflow::restore(horovod::tensorflow::g_for_the_caller);
}
