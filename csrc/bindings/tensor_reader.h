// How tensors come in: as tuples of addresses, or as a framework's own objects.
//
// Objects are read through the functions that a framework offers for that in C (DLPack's exchange functions,
// https://dmlc.github.io/dlpack/latest/c_api.html), which takes less time than one of its attributes. What they can't
// say or refuse goes to a Python function of the framework's adapter, which also knows how to word a refusal.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include <pybind11/pybind11.h>

#include "bindings/dlpack.h"
#include "engine/communicator.h"

namespace horovod {

// Owns the memory of a tensor of an operation. A reference to the tensor alone keeps the object only: a framework may
// give it other memory while the operation is in flight (torch's `tensor.data = other`), and free what it had.
struct Owner {
  pybind11::object object;
  uintptr_t address = 0;  // where its memory began when the operation was submitted; 0: not known
};
// The owners of one operation's memory. Most operations have one tensor, for which nothing is allocated: a small
// operation would notice. An Owners that was moved from may only be destroyed.
class Owners {
 public:
  void expect(size_t count) {
    if (count > 1) more_.reserve(count - 1);
  }
  Owner& add() { return size_++ == 0 ? first_ : more_.emplace_back(); }
  size_t size() const { return size_; }
  const Owner& operator[](size_t place) const { return place == 0 ? first_ : more_[place - 1]; }

 private:
  Owner first_;
  std::vector<Owner> more_;
  size_t size_ = 0;
};

// One object that references `keep` and the owners.
pybind11::object bundle(pybind11::object keep, const Owners& owners);

class TensorReader {
 public:
  // types: those of objects that may be read in C, by exactly these; a subclass may change what a tensor is.
  // describe: makes the tuple of addresses of any other object, or raises.
  // owner: what owns the memory of a tensor; address: where the memory of such an owner begins.
  // negated: whether a tensor's values are those in its memory with the other sign, which DLPack does not tell.
  // These three may be None.
  TensorReader(const pybind11::sequence& types, pybind11::object describe, pybind11::object owner,
               pybind11::object address, pybind11::object negated);
  ~TensorReader();
  TensorReader(const TensorReader&) = delete;
  TensorReader& operator=(const TensorReader&) = delete;

  struct Seen {
    std::byte* address = nullptr;
    TensorSpec spec;
    int device = -1;  // -1: the tensor is in the host's memory
    uintptr_t stream = 0;
  };
  // Throws what the description of the tensor raises.
  void read(PyObject* tensor, Seen& seen) const;

  // Adds the owner of the tensor's memory. watch: check_unmoved() is to look at it.
  void hold(PyObject* tensor, bool watch, Owners& owners) const;
  // A reference to an owner keeps its memory unless the owner itself is told to give it back (torch's
  // `untyped_storage().resize_()`), which no reference prevents. Throws ValueError when one of them has been since.
  void check_unmoved(const Owners& owners, const std::string& name) const;

  // Whether it can make a tensor of this buffer. Memory on a device may be for the framework itself to take.
  bool makes(const OutputBuffer& buffer, DType dtype) const;
  // A tensor on the buffer's memory, which it owns.
  pybind11::object make(OutputBuffer buffer, DType dtype) const;

 private:
  bool read_quickly(PyObject* tensor, Seen& seen) const;
  uintptr_t address_of(const pybind11::object& owner) const;
  bool is_negated(PyObject* tensor) const;

  std::vector<PyTypeObject*> types_;  // kept alive by keep_
  pybind11::tuple keep_;
  const DlExchangeApi* api_ = nullptr;  // null: this framework has none; lives as long as its types
  pybind11::object describe_;
  pybind11::object owner_;    // None: a tensor of this framework always keeps its memory
  pybind11::object address_;  // None: owners never give their memory back
  pybind11::object negated_;  // None: no tensor of this framework is negated
};

// Adds one tensor: (input address, output address or 0, dtype, shape), on a GPU with its number and a stream; or an
// object that `reader` reads, for both input and output; or a tuple of two of them, the second None where the engine
// allocates the output. Of a pair, the caller alone has the second one. The owners of the memory of objects are added
// to `owners`. Throws Python's exceptions.
void add_tensor(PyObject* item, const TensorReader* reader, bool watch, Submission& submission, Owners& owners);

DType dtype_of(long number);

}  // namespace horovod
