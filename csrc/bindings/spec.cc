#include "bindings/spec.h"

#include <string>

#include <pybind11/native_enum.h>

#include "base/dtype.h"
#include "bindings/errors.h"
#include "engine/communicator.h"

namespace py = pybind11;

namespace horovod {
namespace {

// A member of each enum is an int as well, so Python passes it wherever the engine asks for the number.
constexpr const char* kIntEnum = "enum.IntEnum";

std::string upper(std::string text) {
  for (char& letter : text) letter = static_cast<char>(letter >= 'a' && letter <= 'z' ? letter - 'a' + 'A' : letter);
  return text;
}

void add_enums(py::module_& module) {
  py::native_enum<OpType> types(module, "OpType", kIntEnum);
  for (int i = 0; i < kOpTypeCount; ++i) types.value(name_of(static_cast<OpType>(i)), static_cast<OpType>(i));
  types.finalize();
  py::native_enum<DType> dtypes(module, "DType", kIntEnum);
  for (int i = 0; i < kDTypeCount; ++i) {
    dtypes.value(upper(name_of(static_cast<DType>(i))).c_str(), static_cast<DType>(i));
  }
  dtypes.finalize();
  py::native_enum<ReduceOp> reductions(module, "ReduceOp", kIntEnum);
  for (int i = 0; i < kReduceOpCount; ++i) {
    reductions.value(upper(name_of(static_cast<ReduceOp>(i))).c_str(), static_cast<ReduceOp>(i));
  }
  reductions.finalize();
  py::native_enum<DeviceKind>(module, "DeviceKind", kIntEnum)
      .value("CPU", DeviceKind::cpu)
      .value("GPU", DeviceKind::gpu)
      .finalize();
  py::native_enum<JoinPhase>(module, "JoinPhase", kIntEnum)
      .value("OPEN", JoinPhase::open)
      .value("ENDING", JoinPhase::ending)
      .value("OVER", JoinPhase::over)
      .finalize();
}

// The traits of each type of operation, by its name.
py::dict traits() {
  py::dict all;
  for (const OpTraits& type : kOpTraits) {
    py::dict row;
    row["no_tensors"] = type.no_tensors;
    row["reduces"] = type.reduces;
    row["rooted"] = type.rooted;
    row["needs_rows"] = type.needs_rows;
    row["uneven_rows"] = type.uneven_rows;
    row["allocates"] = type.allocates;
    row["fuses"] = type.fuses;
    row["on_device"] = type.on_device;
    all[type.name] = row;
  }
  return all;
}

std::string in_words(const OpSpec& spec) {
  const auto text = [](double value) { return py::repr(py::float_(value)).cast<std::string>(); };
  return std::string("OpSpec(") + name_of(spec.type) + ", op=" + std::to_string(static_cast<int>(spec.reduce_op)) +
         ", prescale=" + text(spec.prescale) + ", postscale=" + text(spec.postscale) +
         ", root=" + std::to_string(spec.root) + ", process_set=" + std::to_string(spec.process_set) + ")";
}

}  // namespace

OpSpec make_spec(int type, int reduce_op, double prescale, double postscale, int root, int process_set) {
  if (type < 0 || type >= kOpTypeCount) refuse(error_code::invalid_operation, "Unknown kind of operation.");
  if (reduce_op < 0 || reduce_op >= kReduceOpCount) {
    refuse(error_code::invalid_operation, "Unknown reduce operation " + std::to_string(reduce_op) + ".");
  }
  OpSpec spec;
  spec.type = static_cast<OpType>(type);
  spec.reduce_op = static_cast<ReduceOp>(reduce_op);
  spec.prescale = prescale;
  spec.postscale = postscale;
  spec.root = root;
  spec.process_set = process_set;
  return spec;
}

void add_specs(py::module_& module) {
  add_enums(module);
  module.attr("OP_TRAITS") = traits();
  module.attr("MAX_IDS") = kMaxIds;
  module.attr("MAX_NAME_LENGTH") = kMostNameCharacters;
  module.attr("MAX_TENSORS") = kMostTensors;
  module.attr("MAX_DIMENSIONS") = kMostDimensions;
  py::class_<PySpec>(module, "OpSpec")
      .def(py::init([](int type, int op, double prescale, double postscale, int root, int process_set) {
             return PySpec{make_spec(type, op, prescale, postscale, root, process_set)};
           }),
           py::arg("type"), py::kw_only(), py::arg("op") = static_cast<int>(ReduceOp::sum), py::arg("prescale") = 1.0,
           py::arg("postscale") = 1.0, py::arg("root") = 0, py::arg("process_set") = 0)
      .def_property_readonly("type", [](const PySpec& self) { return static_cast<int>(self.spec.type); })
      .def_property_readonly("op", [](const PySpec& self) { return static_cast<int>(self.spec.reduce_op); })
      .def_property_readonly("prescale", [](const PySpec& self) { return self.spec.prescale; })
      .def_property_readonly("postscale", [](const PySpec& self) { return self.spec.postscale; })
      .def_property_readonly("root", [](const PySpec& self) { return self.spec.root; })
      .def_property_readonly("process_set", [](const PySpec& self) { return self.spec.process_set; })
      .def("__repr__", [](const PySpec& self) { return in_words(self.spec); });
}

}  // namespace horovod
