#include "bindings/tensor_reader.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "bindings/errors.h"
#include "bindings/remembered.h"

namespace py = pybind11;

namespace horovod {
namespace {

constexpr const char* kDevicesDiffer = "The tensors of one operation must be on one device and one stream.";

std::byte* address_at(PyObject* tuple, int place) {
  return reinterpret_cast<std::byte*>(PyLong_AsSize_t(PyTuple_GET_ITEM(tuple, place)));
}

void read_shape(PyObject* shape, std::vector<int64_t>& into) {
  const auto items = py::reinterpret_steal<py::object>(PySequence_Fast(shape, "shape must be a sequence"));
  if (!items) throw py::error_already_set();
  const Py_ssize_t dimensions = PySequence_Fast_GET_SIZE(items.ptr());
  into.reserve(static_cast<size_t>(dimensions));
  for (Py_ssize_t i = 0; i < dimensions; ++i) {
    into.push_back(PyLong_AsLongLong(PySequence_Fast_GET_ITEM(items.ptr(), i)));
  }
}

// Reads input and output address, dtype and shape, and on a GPU its number and a stream. Returns the output.
std::byte* read_addresses(PyObject* tuple, TensorReader::Seen& seen) {
  const Py_ssize_t items = PyTuple_Check(tuple) ? PyTuple_GET_SIZE(tuple) : 0;
  if (items != 4 && items != 6) {
    refuse(error_code::internal,
           "A tensor is a tuple (input address, output address, dtype, shape), on a GPU with its number and a stream.");
  }
  seen.address = address_at(tuple, 0);
  std::byte* const output = address_at(tuple, 1);
  const long dtype = PyLong_AsLong(PyTuple_GET_ITEM(tuple, 2));
  read_shape(PyTuple_GET_ITEM(tuple, 3), seen.spec.shape);
  long device = -1;
  if (items == 6) {
    device = PyLong_AsLong(PyTuple_GET_ITEM(tuple, 4));
    seen.stream = PyLong_AsSize_t(PyTuple_GET_ITEM(tuple, 5));
    if (device < 0 && !PyErr_Occurred()) refuse(error_code::no_gpu, "There is no GPU " + std::to_string(device) + ".");
  }
  if (PyErr_Occurred()) throw py::error_already_set();
  seen.spec.dtype = dtype_of(dtype);
  seen.device = static_cast<int>(device);
  return output;
}

void put_on_device(Submission& submission, const TensorReader::Seen& seen) {
  if (!submission.on_device) {
    if (submission.spec.tensors.size() > 1) refuse(error_code::wrong_tensor, kDevicesDiffer);
    submission.spec.device = DeviceKind::gpu;
    submission.on_device = std::make_unique<OnDevice>();
    submission.on_device->ordinal = seen.device;
    submission.on_device->stream = seen.stream;
  }
  if (submission.on_device->ordinal != seen.device || submission.on_device->stream != seen.stream) {
    refuse(error_code::wrong_tensor, kDevicesDiffer);
  }
}

}  // namespace

py::object bundle(py::object keep, const Owners& owners) {
  if (owners.size() == 0) return keep;
  py::tuple all(owners.size() + 1);
  all[0] = std::move(keep);
  for (size_t i = 0; i < owners.size(); ++i) all[i + 1] = owners[i].object;
  return all;
}

TensorReader::TensorReader(const py::sequence& types, py::object describe, py::object owner, py::object address,
                           py::object negated)
    : keep_(types),
      describe_(std::move(describe)),
      owner_(std::move(owner)),
      address_(std::move(address)),
      negated_(std::move(negated)) {
  for (const py::handle type : keep_) {
    if (!PyType_Check(type.ptr())) throw py::type_error("types must be types.");
    types_.push_back(reinterpret_cast<PyTypeObject*>(type.ptr()));
  }
  if (types_.empty() || !py::hasattr(keep_[0], DlExchangeApi::kAttribute)) return;
  const py::object capsule = keep_[0].attr(DlExchangeApi::kAttribute);
  api_ = static_cast<const DlExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), DlExchangeApi::kCapsule));
  if (PyErr_Occurred()) throw py::error_already_set();
  while (api_ && (api_->major != DlExchangeApi::kMajor || !api_->tensor_from_object)) api_ = api_->previous;
}

TensorReader::~TensorReader() { Remembered<TensorReader>::forget(this); }

void TensorReader::read(PyObject* tensor, Seen& seen) const {
  if (api_ && std::find(types_.begin(), types_.end(), Py_TYPE(tensor)) != types_.end() && read_quickly(tensor, seen)) {
    return;
  }
  seen = {};
  const py::object tuple = describe_(py::handle(tensor));
  read_addresses(tuple.ptr(), seen);
}

// False: the object is no usual tensor, so read() has to find out more.
bool TensorReader::read_quickly(PyObject* tensor, Seen& seen) const {
  DlTensor found;
  if (api_->tensor_from_object(tensor, &found) != 0) {
    PyErr_Clear();
    return false;
  }
  if (!dtype_from(found, seen.spec.dtype) || !is_contiguous(found) || is_negated(tensor)) return false;
  if (found.device_type == kDlCuda) {
    void* stream = nullptr;
    if (!api_->current_work_stream) return false;
    if (api_->current_work_stream(found.device_type, found.device_id, &stream) != 0) {
      PyErr_Clear();
      return false;
    }
    seen.device = found.device_id;
    seen.stream = reinterpret_cast<uintptr_t>(stream);
  } else if (found.device_type != kDlCpu) {
    return false;
  }
  seen.address = static_cast<std::byte*>(found.data) + found.byte_offset;
  seen.spec.shape.assign(found.shape, found.shape + found.dimensions);
  return true;
}

bool TensorReader::is_negated(PyObject* tensor) const {
  if (negated_.is_none()) return false;
  const auto answer = py::reinterpret_steal<py::object>(PyObject_CallOneArg(negated_.ptr(), tensor));
  if (!answer) throw py::error_already_set();
  return answer.ptr() != Py_False;
}

void TensorReader::hold(PyObject* tensor, bool watch, Owners& owners) const {
  if (owner_.is_none()) return;
  Owner& made = owners.add();
  made.object = py::reinterpret_steal<py::object>(PyObject_CallOneArg(owner_.ptr(), tensor));
  if (!made.object) throw py::error_already_set();
  if (watch) made.address = address_of(made.object);
}

// The address where the owner's memory begins; 0 if it has none, or can't say.
uintptr_t TensorReader::address_of(const py::object& owner) const {
  if (address_.is_none()) return 0;
  const auto answer = py::reinterpret_steal<py::object>(PyObject_CallOneArg(address_.ptr(), owner.ptr()));
  const size_t address = answer ? PyLong_AsSize_t(answer.ptr()) : 0;
  if (!PyErr_Occurred()) return address;
  PyErr_Clear();
  return 0;
}

void TensorReader::check_unmoved(const Owners& owners, const std::string& name) const {
  for (size_t i = 0; i < owners.size(); ++i) {
    const Owner& owner = owners[i];
    if (owner.address == 0 || owner.address == address_of(owner.object)) continue;
    refuse(error_code::moved_tensor,
           "The memory of " +
               (owners.size() > 1 ? "one of the " + std::to_string(owners.size()) + " tensors" : "the tensor") +
               " of " + name +
               " was given back or moved while the operation was in flight (for example by resize_(), by "
               "untyped_storage().resize_() or by share_memory_()), so there is no result. Leave tensors alone "
               "until synchronize() has returned, or pass a copy: tensor.clone().");
  }
}

bool TensorReader::makes(const OutputBuffer& buffer, DType dtype) const {
  return api_ && api_->managed_to_object && !buffer.on_device && !is_float8(dtype);
}

py::object TensorReader::make(OutputBuffer buffer, DType dtype) const {
  auto result = managed_result<DlManagedVersioned>(std::move(buffer), dtype);
  result->managed.major = DlExchangeApi::kMajor;
  result->managed.minor = api_->minor;
  void* object = nullptr;
  // Whether a framework that fails has taken it over is not said: losing memory then is better than freeing it twice.
  if (api_->managed_to_object(&result.release()->managed, &object) != 0) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(static_cast<PyObject*>(object));
}

void add_tensor(PyObject* item, const TensorReader* reader, bool watch, Submission& submission, Owners& owners) {
  TensorReader::Seen seen;
  Span span;
  const bool pair = PyTuple_Check(item) && PyTuple_GET_SIZE(item) == 2;
  if (!reader || (PyTuple_Check(item) && !pair)) {
    span.output = read_addresses(item, seen);
  } else {
    PyObject* const tensor = pair ? PyTuple_GET_ITEM(item, 0) : item;
    reader->read(tensor, seen);
    reader->hold(tensor, watch, owners);
    span.output = seen.address;
  }
  if (pair && PyTuple_GET_ITEM(item, 1) == Py_None) {
    span.output = nullptr;
  } else if (pair) {
    TensorReader::Seen output;
    reader->read(PyTuple_GET_ITEM(item, 1), output);
    if (output.spec.dtype != seen.spec.dtype || output.spec.elements() != seen.spec.elements() ||
        output.device != seen.device) {
      refuse(error_code::wrong_tensor, "The tensor for the result must be of the dtype, size and device of the input.");
    }
    span.output = output.address;
  }
  span.input = seen.address;
  span.count = seen.spec.elements();
  submission.spec.tensors.push_back(std::move(seen.spec));
  submission.spans.push_back(span);
  if (seen.device >= 0) [[unlikely]]
    put_on_device(submission, seen);
  if ((seen.device >= 0) != (submission.on_device != nullptr)) refuse(error_code::wrong_tensor, kDevicesDiffer);
}

DType dtype_of(long number) {
  if (number < 0 || number >= kDTypeCount)
    refuse(error_code::internal, "Unknown dtype " + std::to_string(number) + ".");
  return static_cast<DType>(number);
}

}  // namespace horovod
