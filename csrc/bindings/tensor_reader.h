// How tensors come in: as tuples of addresses, or as a framework's own objects.
//
// Objects are read through the functions that a framework offers for that in C (DLPack's exchange functions,
// https://dmlc.github.io/dlpack/latest/c_api.html), which takes less time than one of its attributes. What they can't
// say or refuse goes to a Python function of the framework's adapter, which also knows how to word a refusal.
#pragma once

#include <vector>

#include <pybind11/pybind11.h>

#include "bindings/dlpack.h"
#include "engine/communicator.h"

namespace horovod {

class TensorReader {
 public:
  // types: those of objects that may be read in C, by exactly these; a subclass may change what a tensor is.
  // describe: makes the tuple of addresses of any other object, or raises.
  TensorReader(const pybind11::sequence& types, pybind11::object describe);
  ~TensorReader();
  TensorReader(const TensorReader&) = delete;
  TensorReader& operator=(const TensorReader&) = delete;

  struct Seen {
    std::byte* address = nullptr;
    TensorSpec spec;
    int device = -1;  // none: the host's memory
    uintptr_t stream = 0;
  };
  // Throws what the description raises.
  void read(PyObject* tensor, Seen& seen) const;

  // Whether it can make a tensor of this. What is on a device, a framework may want to take itself.
  bool makes(const OutputBuffer& buffer, DType dtype) const;
  // A tensor on the buffer's memory, which it owns.
  pybind11::object make(OutputBuffer buffer, DType dtype) const;

 private:
  bool read_quickly(PyObject* tensor, Seen& seen) const;

  std::vector<PyTypeObject*> types_;  // kept alive by keep_
  pybind11::tuple keep_;
  const DlExchangeApi* api_ = nullptr;  // null: this framework has none; lives as long as its types
  pybind11::object describe_;
};

// Adds one tensor: (input address, output address or 0, dtype, shape), on a GPU with its number and a stream; or an
// object that `reader` reads, for both input and output; or a tuple of two of them, the second None where the engine
// allocates the output. Throws Python's exceptions.
void add_tensor(PyObject* item, const TensorReader* reader, Submission& submission);

DType dtype_of(long number);

}  // namespace horovod
