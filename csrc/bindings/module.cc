// The Python module horovod._core; clients/horovod/_core.pyi is its documentation.
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "backends/cuda/compiler.h"
#include "backends/cuda/driver.h"
#include "backends/gloo/backend.h"
#include "backends/nccl/library.h"
#include "bindings/c_engine.h"
#include "bindings/copier.h"
#include "bindings/dlpack.h"
#include "bindings/engine.h"
#include "bindings/errors.h"
#include "bindings/impatience.h"
#include "bindings/operations.h"
#include "bindings/options.h"
#include "bindings/spec.h"
#include "bindings/tensor_reader.h"
#include "collectives/partners.h"
#include "engine/waiting_thread.h"
#include "kernels/kernels.h"

namespace py = pybind11;

PYBIND11_MODULE(_core, module) {
  using namespace horovod;
  module.doc() = "The native engine of horovod (private).";
  module.def("isa", [] { return kernels::isa(); });
  module.def("gloo_obstacle", [] { return gloo_available().message(); });
  module.def(
      "nccl_version",
      [](const std::string& file) {
        Status status;
        const nccl::Library* library = nccl::library(file, status);
        return std::make_pair(library ? library->version_code : 0, status.message());
      },
      py::arg("file"));
  module.def(
      "cuda_obstacle",
      [](const std::string& file) {
        Status status;
        (void)cuda::driver(file, status);
        return status.message();
      },
      py::arg("file"));
  module.def(
      "copy_kernel",
      [](const std::string& file, int capability) {
        Status status;
        const cuda::CopyKernel* kernel = cuda::copy_kernel(file, capability, status);
        return py::make_tuple(py::bytes(kernel ? kernel->image : std::string()), status.message());
      },
      py::arg("file"), py::arg("capability"));
  module.def(
      "complete_options", [](Options options) { return options_of(config_from(std::move(options))); },
      py::arg("options"));
  module.def(
      "partners",
      [](int rank, int size, const std::vector<int>& hosts, const std::vector<int>& placement, Options options) {
        const auto fits = [size](const std::vector<int>& of) {
          return of.empty() || static_cast<int>(of.size()) == size;
        };
        if (rank < 0 || rank >= size || !fits(hosts) || !fits(placement)) {
          refuse(error_code::internal,
                 "The rank must be in the world, and there must be one host for each rank or none.");
        }
        return partners_of(size, rank, hosts, placement, config_from(std::move(options)));
      },
      py::arg("rank"), py::arg("size"), py::kw_only(), py::arg("hosts") = std::vector<int>(),
      py::arg("placement") = std::vector<int>(), py::arg("options") = Options());
  module.def("on_impatience", &Impatience::set, py::arg("function"));
  module.def("stand_in", &WaitingThread::stand_in, py::arg("does"));
  module.def("set_error_types", &set_internal_error, py::arg("internal_error"));

  add_specs(module);
  module.attr("C_API") = py::capsule(horovod_api(), "horovod._core.C_API");
  module.def(
      "set_current_engine", [](const PyEngine* engine) { set_current(engine ? engine->c_engine() : nullptr); },
      py::arg("engine"));

  py::class_<PySegment>(module, "Segment")
      .def(py::init([](bool in_process, const Options& options) {
             Status status;
             PySegment segment{Segment::create(Engine::segment_bytes(config_from(options)), in_process, status)};
             if (!segment.segment) raise_status(status);
             return segment;
           }),
           py::kw_only(), py::arg("in_process") = false, py::arg("options") = Options())
      .def_property_readonly("address", [](const PySegment& self) { return self.segment->address(); })
      .def(
          "await_attached",
          [](const PySegment& self, uint32_t peers, double timeout_seconds) {
            return self.segment->await_attached(peers, static_cast<int64_t>(timeout_seconds * 1e6));
          },
          py::arg("peers"), py::arg("timeout_seconds"), py::call_guard<py::gil_scoped_release>());

  py::class_<Output>(module, "Output", py::buffer_protocol())
      .def_buffer([](Output& self) {
        if (self.buffer.on_device)
          throw py::buffer_error(coded(error_code::internal, "The result is on a GPU; take it with dlpack()."));
        return py::buffer_info(self.buffer.data.get(), 1, py::format_descriptor<uint8_t>::format(),
                               static_cast<py::ssize_t>(self.buffer.bytes));
      })
      .def_property_readonly("shape", [](const Output& self) { return to_tuple(self.buffer.shape); })
      .def_property_readonly("dtype", [](const Output& self) { return static_cast<int>(self.dtype); })
      .def_property_readonly("nbytes", [](const Output& self) { return self.buffer.bytes; })
      .def("dlpack", [](Output& self) { return to_dlpack(std::exchange(self.buffer, {}), self.dtype); });

  py::class_<PyCopier>(module, "Copier")
      .def(py::init<int, bool, const std::string&, std::string>(), py::kw_only(), py::arg("ordinal"),
           py::arg("one_kernel"), py::arg("cuda_file"), py::arg("nvrtc_file"))
      .def_property_readonly("stream", &PyCopier::stream)
      .def_property_readonly("obstacle", &PyCopier::obstacle)
      .def("copy", &PyCopier::copy, py::arg("copies"), py::arg("times") = 1);

  py::class_<TensorReader>(module, "TensorReader")
      .def(py::init<const py::sequence&, py::object, py::object, py::object, py::object>(), py::arg("types"),
           py::arg("describe"), py::arg("owner") = py::none(), py::arg("address") = py::none(),
           py::arg("negated") = py::none());

  py::class_<Unfinished>(module, "Unfinished")
      .def_readonly("process_set", &Unfinished::process_set)
      .def_readonly("name", &Unfinished::name)
      .def_readonly("awaited", &Unfinished::awaited)
      .def_readonly("number", &Unfinished::number);

  py::class_<BlockedReport>(module, "BlockedReport")
      .def_readonly("started", &BlockedReport::started)
      .def_readonly("all_threads", &BlockedReport::all_threads)
      .def_readonly("moving", &BlockedReport::moving)
      .def_readonly("cut_short", &BlockedReport::cut_short)
      .def_readonly("cpu_us", &BlockedReport::cpu_us)
      .def_property_readonly("executed",
                             [](const BlockedReport& self) {
                               std::map<int, uint64_t> counts;
                               for (const Executed& one : self.executed) counts[one.process_set] = one.count;
                               return counts;
                             })
      .def_readonly("unfinished", &BlockedReport::unfinished)
      .def_property_readonly("unnamed", [](const BlockedReport& self) {
        std::map<std::pair<int, std::string>, uint64_t> counts;
        for (const Unnamed& one : self.unnamed) counts[{one.process_set, one.name}] = one.count;
        return counts;
      });

  py::class_<PyEngine> engine(module, "Engine");
  engine
      .def(py::init<int, int, uint64_t, std::vector<std::string>, const PySegment*, std::vector<std::string>,
                    std::optional<std::map<int, std::vector<int>>>, std::vector<int>, std::vector<int>,
                    const std::map<std::string, int64_t>&, std::string, std::string, std::string,
                    const std::map<int, std::string>&>(),
           py::kw_only(), py::arg("rank"), py::arg("size"), py::arg("epoch"), py::arg("labels"),
           py::arg("segment") = nullptr, py::arg("segment_addresses") = std::vector<std::string>(),
           py::arg("sockets") = py::none(), py::arg("hosts") = std::vector<int>(),
           py::arg("placement") = std::vector<int>(), py::arg("options") = std::map<std::string, int64_t>(),
           py::arg("cuda_file") = "", py::arg("nccl_file") = "", py::arg("nvrtc_file") = "",
           py::arg("wire_keys") = std::map<int, std::string>())
      .def("add_process_set", &PyEngine::add_process_set, py::arg("number"), py::arg("ranks"), py::kw_only(),
           py::arg("segment") = nullptr, py::arg("segment_addresses") = std::vector<std::string>(),
           py::arg("sockets") = py::none(), py::arg("hosts") = std::vector<int>(),
           py::arg("wire_keys") = std::map<int, std::string>())
      .def("remove_process_set", &PyEngine::remove_process_set, py::arg("number"))
      .def("c_engine",
           [](const PyEngine& self) {
             return py::capsule(self.c_engine(), "horovod.engine", [](PyObject* capsule) {
               horovod_api()->release_engine(
                   static_cast<HorovodEngine*>(PyCapsule_GetPointer(capsule, "horovod.engine")));
             });
           })
      .def("pending", &PyEngine::pending, py::arg("process_set"))
      .def("next_outbox", &PyEngine::next_outbox, py::arg("timeout_ms"))
      .def("join", &PyEngine::join, py::arg("device") = -1)
      .def("apply_plan", &PyEngine::apply_plan, py::arg("process_set"), py::arg("name"), py::arg("id"),
           py::arg("operation") = py::none())
      .def("apply_error", &PyEngine::apply_error, py::arg("process_set"), py::arg("name"), py::arg("sentence"))
      .def("apply_failures", &PyEngine::apply_failures, py::arg("errors"), py::arg("recalls"))
      .def("apply_recall", &PyEngine::apply_recall, py::arg("process_set"), py::arg("ids"))
      .def("blocked_report", &PyEngine::blocked_report)
      .def("apply_join", &PyEngine::apply_join, py::arg("rounds_over"), py::arg("ranks"), py::arg("phase"),
           py::arg("sentence"))
      .def("peer_left", &PyEngine::peer_left, py::arg("rank"), py::arg("sentence"))
      .def("abort", &PyEngine::abort, py::arg("sentence"))
      .def("check", &PyEngine::check)
      .def("check_results", &PyEngine::check_results)
      .def("lost_peer", &PyEngine::lost_peer)
      .def("close", &PyEngine::close, py::arg("sentence") = "", py::arg("keep") = false)
      .def("kept_sockets", &PyEngine::kept_sockets)
      .def("counters", &PyEngine::counters)
      .def("known", &PyEngine::known, py::call_guard<py::gil_scoped_release>())
      .def("start_timeline", &PyEngine::start_timeline, py::arg("path"), py::arg("mark_cycles"),
           py::arg("since_epoch_us"))
      .def("stop_timeline", &PyEngine::stop_timeline)
      .def("forget_timeline", &PyEngine::forget_timeline);
  add_operations(module, engine);
}
