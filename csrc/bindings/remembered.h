// The C++ object behind the Python object that nearly every call names. pybind11 looks up the type in two hash tables
// to find it, which a small operation notices; so the last one is remembered.
#pragma once

#include <pybind11/pybind11.h>

namespace horovod {

// T's destructor calls forget(this). The GIL guards all of it.
template <typename T>
class Remembered {
 public:
  // Throws the exceptions of pybind11's cast.
  static T& of(PyObject* object) {
    if (object != object_) {
      value_ = &pybind11::handle(object).cast<T&>();
      object_ = object;
    }
    return *value_;
  }
  // To be called before `value` is freed: another object may get its address.
  static void forget(const T* value) {
    if (value == value_) object_ = nullptr;
  }

 private:
  inline static PyObject* object_ = nullptr;  // borrowed: it lives as long as *value_, which forget() reports
  inline static T* value_ = nullptr;
};

}  // namespace horovod
