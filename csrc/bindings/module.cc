// The Python module horovod._core; clients/horovod/_core.pyi is its documentation. Nothing is decided here: arguments
// become records, blocking calls release the GIL, statuses become exceptions.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <time.h>
#include <unistd.h>

#include "backends/cuda/driver.h"
#include "backends/gloo/backend.h"
#include "backends/nccl/library.h"
#include "bindings/dlpack.h"
#include "engine/engine.h"
#include "engine/waiting_thread.h"
#include "kernels/kernels.h"

namespace py = pybind11;

namespace horovod {
namespace {

constexpr const char* kDevicesDiffer = "The tensors of one operation must be on one device and one stream.";
constexpr long kDeviceNapNs = 50'000;        // between two looks at a device, where the host is to wait for it
constexpr int64_t kSignalSliceUs = 100'000;  // how often a waiting Python thread looks for signals

PyObject* g_internal_error = nullptr;  // set once by set_error_types; guarded by the GIL, never freed

[[noreturn]] void raise_status(const Status& status) {
  if (status.code() == Code::invalid_argument) throw py::value_error(status.message());
  PyErr_SetString(g_internal_error ? g_internal_error : PyExc_RuntimeError, status.message().c_str());
  throw py::error_already_set();
}

// Called by a driving thread that waits for a peer. The pending Python exception stays set for the caller of wait().
bool signal_pending() {
  const py::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0;
}

Config config_from(const std::map<std::string, int64_t>& options) {
  Config config;
  for (const auto& [name, value] : options) {
    if (name == "fusion_threshold_bytes") {
      config.fusion_threshold_bytes = static_cast<size_t>(value);
    } else if (name == "spin_us") {
      config.spin_us = value;
    } else if (name == "yield_us") {
      config.yield_us = value;
    } else if (name == "background_cpu") {
      config.background_cpu = static_cast<int>(value);
    } else if (name == "progress_timeout_ms") {
      config.progress_timeout_ms = value;
    } else if (name == "slot_bytes") {
      config.slot_bytes = static_cast<size_t>(value);
    } else if (name == "slot_count") {
      config.slot_count = static_cast<int>(value);
    } else if (name == "gloo") {
      config.gloo = value != 0;
    } else if (name == "nccl_streams") {
      config.nccl_streams = static_cast<int>(value);
    } else if (name == "async_completion") {
      config.async_completion = value != 0;
    } else {
      throw py::value_error("Unknown engine option '" + name + "'.");
    }
  }
  return config;
}

struct PySegment {
  std::shared_ptr<Segment> segment;
};

struct Output {
  OutputBuffer buffer;
  DType dtype;
};

py::tuple to_tuple(const std::vector<int64_t>& values) {
  py::tuple result(values.size());
  for (size_t i = 0; i < values.size(); ++i) result[i] = values[i];
  return result;
}

py::tuple describe(const OpSpec& spec, int process_set) {
  py::list tensors;
  for (const TensorSpec& tensor : spec.tensors) {
    tensors.append(py::make_tuple(static_cast<int>(tensor.dtype), to_tuple(tensor.shape)));
  }
  return py::make_tuple(spec.name, static_cast<int>(spec.type), tensors, static_cast<int>(spec.reduce_op),
                        spec.prescale, spec.postscale, spec.root, process_set, static_cast<int>(spec.device));
}

class PyHandle;

class PyEngine : public std::enable_shared_from_this<PyEngine> {
 public:
  PyEngine(int rank, int size, uint64_t epoch, std::vector<std::string> labels, const PySegment* segment,
           std::vector<std::string> segment_addresses, std::optional<std::map<int, std::vector<int>>> sockets,
           std::vector<int> hosts, const std::map<std::string, int64_t>& options, std::string cuda_file,
           std::string nccl_file) {
    if (static_cast<int>(labels.size()) != size) throw py::value_error("labels must name every rank.");
    WorldSpec world;
    world.rank = rank;
    world.epoch = epoch;
    world.labels = std::move(labels);
    if (segment) world.segment = segment->segment;
    world.segment_addresses = std::move(segment_addresses);
    if (sockets) world.sockets = std::move(*sockets);
    world.hosts = std::move(hosts);
    Config config = config_from(options);
    config.cuda_file = std::move(cuda_file);
    config.nccl_file = std::move(nccl_file);
    Status status;
    {
      const py::gil_scoped_release release;
      engine_ = Engine::create(std::move(world), config, status);
    }
    if (!engine_) raise_status(status);
  }

  ~PyEngine() {
    const py::gil_scoped_release release;
    engine_.reset();  // nothing uses the memory of what is abandoned any more
  }

  std::unique_ptr<PyHandle> submit(int kind, std::string name, const py::sequence& tensors, int reduce_op,
                                   double prescale, double postscale, int root, const py::object& splits,
                                   int process_set, bool wait_follows, py::object keep, py::object finish);

  py::object run(int kind, std::string name, const py::sequence& tensors, int reduce_op, double prescale,
                 double postscale, int root, const py::object& splits, int process_set, py::object keep) {
    const std::shared_ptr<Submission> submission =
        make_submission(kind, std::move(name), tensors, reduce_op, prescale, postscale, root, splits, process_set);
    Status status;
    {
      const py::gil_scoped_release release;
      status = engine_->start(submission, true);
    }
    if (!status.ok()) raise_status(status);
    try {
      await(*submission);
    } catch (const py::error_already_set&) {
      abandon(submission, std::move(keep));
      throw;
    }
    if (submission->on_device) [[unlikely]]
      return hand_over(submission, submission->on_device->stream, std::move(keep));
    return result_of(*submission);
  }

  // Nobody will wait for it any more; what it uses is kept until it is over.
  void abandon(std::shared_ptr<Submission> submission, py::object keep) {
    if (is_over(*submission) || process_ != getpid()) return;  // nothing runs in a forked child
    abandoned_.emplace_back(std::move(submission), std::move(keep));
  }

  static bool is_done(const Submission& submission) {
    return submission.state.load(std::memory_order_acquire) == Operation::done;
  }

  // Whether waiting for it has an end at once.
  bool over(const Submission& submission) const { return engine_->over(submission); }

  // Until it is done, or a signal's handler raises.
  void await(Submission& submission) {
    WaitingThread::Wait waiting;
    for (bool done = is_done(submission); !done;) {
      {
        const py::gil_scoped_release release;
        t_interrupt_hook = &signal_pending;
        done = engine_->wait(submission, kSignalSliceUs);
        t_interrupt_hook = nullptr;
      }
      if (PyErr_Occurred() || (!done && PyErr_CheckSignals() != 0)) throw py::error_already_set();
      if (!done) waiting.blocked();
    }
    if (submission.on_device) [[unlikely]]
      await_device(submission);
  }

  // Where the host is to wait for it.
  void await_device(const Submission& submission) {
    while (!engine_->over(submission)) {
      {
        const py::gil_scoped_release release;
        const timespec nap{0, kDeviceNapNs};
        nanosleep(&nap, nullptr);
      }
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    }
  }

  // Whether nothing uses its tensors any more: on a device that is later than when it is done.
  static bool is_over(const Submission& submission) {
    if (!is_done(submission)) return false;
    if (!submission.on_device || !submission.on_device->finished) return true;
    bool passed = false;
    return !submission.on_device->finished->passed(passed).ok() || passed;
  }

  // Of an operation on a device that is done; called once. What it uses is kept until the device has come so far.
  py::object hand_over(const std::shared_ptr<Submission>& submission, uintptr_t stream, py::object keep) {
    const Status status = engine_->hand_over(*submission, stream);
    on_device_.emplace_back(submission, std::move(keep));
    if (!status.ok()) raise_status(status);
    return result_of(*submission);
  }

  // Of an operation that is done; called once.
  static py::object result_of(Submission& submission) {
    if (!submission.status.ok()) raise_status(submission.status);
    if (submission.outputs.empty() || !submission.outputs[0].data) return py::none();
    py::list outputs;
    for (size_t i = 0; i < submission.outputs.size(); ++i) {
      outputs.append(py::cast(Output{std::move(submission.outputs[i]), submission.spec.tensors[i].dtype}));
    }
    if (submission.spec.type == OpType::alltoall) {
      return py::make_tuple(outputs, py::cast(submission.received_splits));
    }
    return outputs;
  }

  void add_process_set(int number, std::vector<int> ranks, const PySegment* segment,
                       std::vector<std::string> segment_addresses,
                       std::optional<std::map<int, std::vector<int>>> sockets, std::vector<int> hosts) {
    ProcessSetSpec spec;
    spec.number = number;
    spec.ranks = std::move(ranks);
    if (segment) spec.segment = segment->segment;
    spec.segment_addresses = std::move(segment_addresses);
    if (sockets) spec.sockets = std::move(*sockets);
    spec.hosts = std::move(hosts);
    Status status;
    {
      const py::gil_scoped_release release;
      status = engine_->add_process_set(std::move(spec));
    }
    if (!status.ok()) raise_status(status);
  }
  void remove_process_set(int number) {
    const py::gil_scoped_release release;
    engine_->remove_process_set(number);
  }
  int64_t pending(int process_set) {
    const py::gil_scoped_release release;
    return engine_->pending(process_set);
  }

  py::object next_outbox(int64_t timeout_ms) {
    std::vector<OutboxItem> items;
    bool open;
    {
      const py::gil_scoped_release release;
      open = engine_->outbox().take(timeout_ms, items);
    }
    if (!open) return py::none();
    py::list result;
    for (const OutboxItem& item : items) {
      if (item.kind == OutboxItem::recalled) {
        result.append(py::make_tuple("recalled", py::make_tuple(item.process_set, item.ids)));
      } else if (item.kind == OutboxItem::join) {
        result.append(py::make_tuple("join", py::make_tuple(item.round, item.without_zeros)));
      } else if (item.kind == OutboxItem::blocked) {
        result.append(py::make_tuple("blocked", describe(item.spec, item.process_set) +
                                                    py::make_tuple(static_cast<double>(item.waited_us) * 1e-6)));
      } else {
        result.append(py::make_tuple("announce", describe(item.spec, item.process_set)));
      }
    }
    return result;
  }

  void apply_plan(int process_set, const std::string& name, uint32_t id, const py::object& operation) {
    OpSpec spec;
    if (!operation.is_none()) {
      const auto [kind, tensors, reduce_op, prescale, postscale, device] =
          operation
              .cast<std::tuple<int, std::vector<std::pair<int, std::vector<int64_t>>>, int, double, double, int>>();
      check_numbers(kind, reduce_op);
      spec.type = static_cast<OpType>(kind);
      spec.reduce_op = static_cast<ReduceOp>(reduce_op);
      spec.prescale = prescale;
      spec.postscale = postscale;
      spec.device = static_cast<DeviceKind>(device);
      for (const auto& [dtype, shape] : tensors) spec.tensors.push_back({dtype_of(dtype), shape});
    }
    const OpSpec* known = operation.is_none() ? nullptr : &spec;
    with_set(process_set, [&](Communicator& communicator) { communicator.apply_plan(name, id, known); });
  }
  void apply_error(int process_set, const std::string& name, const std::string& sentence) {
    with_set(process_set, [&](Communicator& communicator) { communicator.apply_error(name, sentence); });
  }
  void apply_recall(int process_set, const std::vector<uint32_t>& ids) {
    with_set(process_set, [&](Communicator& communicator) { communicator.apply_recall(ids); });
  }

  void apply_join(uint32_t round, const std::vector<int>& ranks, int phase, const std::string& sentence) {
    if (phase < 0 || phase > static_cast<int>(JoinPhase::over)) throw py::value_error("Unknown phase of a join.");
    with_set(0, [&](Communicator& communicator) {
      communicator.apply_join(round, ranks, static_cast<JoinPhase>(phase), sentence);
    });
  }

  // Until all ranks have joined, or a signal's handler raises.
  int join() {
    WaitingThread::Wait waiting;
    int64_t ticket = Communicator::kNoTicket;
    for (int last_rank = -1;;) {
      Status status;
      {
        const py::gil_scoped_release release;
        t_interrupt_hook = &signal_pending;
        status = engine_->communicator(0)->join(kSignalSliceUs, ticket, last_rank);
        t_interrupt_hook = nullptr;
      }
      if (PyErr_Occurred() || PyErr_CheckSignals() != 0) throw py::error_already_set();
      if (!status.ok()) raise_status(status);
      if (last_rank >= 0) return last_rank;
      waiting.blocked();
    }
  }

  py::tuple standstill() {
    Standstill found;
    {
      const py::gil_scoped_release release;
      found = engine_->standstill();
    }
    py::list unfinished;
    for (const Unfinished& one : found.unfinished) {
      unfinished.append(py::make_tuple(one.process_set, one.name, one.awaited));
    }
    return py::make_tuple(found.started, found.all_threads, found.cut_short, unfinished);
  }

  void peer_left(int rank, const std::string& sentence) {
    const py::gil_scoped_release release;
    engine_->peer_left(rank, sentence);
  }
  void abort(const std::string& sentence) {
    const py::gil_scoped_release release;
    engine_->abort(sentence);
  }
  void close(const std::string& sentence) {
    const py::gil_scoped_release release;
    engine_->close(sentence);
  }
  void check() const {
    if (const Status status = engine_->ended(); !status.ok()) raise_status(status);
  }
  std::map<std::string, uint64_t> counters() const { return engine_->counters(); }

  void start_timeline(const std::string& path, bool mark_cycles, int64_t since_epoch_us) {
    Status status;
    {
      const py::gil_scoped_release release;
      status = engine_->timeline().start(path, mark_cycles, since_epoch_us);
    }
    if (!status.ok()) raise_status(status);
  }
  // Whether there was one, and what went wrong with it.
  std::pair<bool, std::string> stop_timeline() {
    const py::gil_scoped_release release;
    bool running = false;
    const Status status = engine_->timeline().stop(running);
    return {running, status.message()};
  }
  void forget_timeline() { engine_->timeline().after_fork(); }

 private:
  using Abandoned = std::pair<std::shared_ptr<Submission>, py::object>;

  std::shared_ptr<Submission> make_submission(int kind, std::string name, const py::sequence& tensors, int reduce_op,
                                              double prescale, double postscale, int root, const py::object& splits,
                                              int process_set) {
    if (!abandoned_.empty()) sweep();
    if (!on_device_.empty()) [[unlikely]]
      sweep_device();
    check_numbers(kind, reduce_op);
    auto submission = std::make_shared<Submission>();
    OpSpec& spec = submission->spec;
    spec.type = static_cast<OpType>(kind);
    spec.name = std::move(name);
    spec.reduce_op = static_cast<ReduceOp>(reduce_op);
    spec.prescale = prescale;
    spec.postscale = postscale;
    spec.root = root;
    spec.process_set = process_set;
    const size_t count = py::len(tensors);
    spec.tensors.reserve(count);
    submission->spans.reserve(count);
    for (size_t i = 0; i < count; ++i) add_tensor(tensors[i], *submission);
    if (!splits.is_none()) submission->splits = splits.cast<std::vector<int32_t>>();
    return submission;
  }

  static void put_on_device(Submission& submission, int device, uintptr_t stream) {
    if (!submission.on_device) {
      if (submission.spec.tensors.size() > 1) throw py::value_error(kDevicesDiffer);
      submission.spec.device = DeviceKind::gpu;
      submission.on_device = std::make_unique<OnDevice>();
      submission.on_device->ordinal = device;
      submission.on_device->stream = stream;
    }
    if (submission.on_device->ordinal != device || submission.on_device->stream != stream) {
      throw py::value_error(kDevicesDiffer);
    }
  }

  static void check_numbers(int kind, int reduce_op) {
    if (kind < 0 || kind >= kOpTypeCount) throw py::value_error("Unknown kind of operation.");
    if (reduce_op < 0 || reduce_op > static_cast<int>(ReduceOp::product)) {
      throw py::value_error("Unknown reduce operation " + std::to_string(reduce_op) + ".");
    }
  }

  static DType dtype_of(long number) {
    if (number < 0 || number >= kDTypeCount) throw py::value_error("Unknown dtype " + std::to_string(number) + ".");
    return static_cast<DType>(number);
  }

  // Lets go of what abandoned operations used that are over. Letting go runs destructors, which may abandon others.
  void sweep() {
    std::vector<Abandoned> over, rest;
    for (Abandoned& one : abandoned_) (is_over(*one.first) ? over : rest).push_back(std::move(one));
    abandoned_ = std::move(rest);
  }

  // The same for what was waited for, oldest first; what is behind one that is not over waits with it.
  void sweep_device() {
    std::vector<Abandoned> over;
    while (!on_device_.empty() && is_over(*on_device_.front().first)) {
      over.push_back(std::move(on_device_.front()));
      on_device_.pop_front();
    }
  }

  static void add_tensor(const py::handle& item, Submission& submission) {
    PyObject* tuple = item.ptr();
    const Py_ssize_t items = PyTuple_Check(tuple) ? PyTuple_GET_SIZE(tuple) : 0;
    if (items != 4 && items != 6) {
      throw py::value_error(
          "A tensor is a tuple (input address, output address, dtype, shape), on a GPU with its number and a stream.");
    }
    const auto address = [&](int place) {
      return reinterpret_cast<std::byte*>(PyLong_AsSize_t(PyTuple_GET_ITEM(tuple, place)));
    };
    Span span;
    span.input = address(0);
    span.output = address(1);
    const long dtype = PyLong_AsLong(PyTuple_GET_ITEM(tuple, 2));
    TensorSpec tensor;
    PyObject* shape = PySequence_Fast(PyTuple_GET_ITEM(tuple, 3), "shape must be a sequence");
    if (!shape) throw py::error_already_set();
    const Py_ssize_t dimensions = PySequence_Fast_GET_SIZE(shape);
    tensor.shape.reserve(static_cast<size_t>(dimensions));
    for (Py_ssize_t i = 0; i < dimensions; ++i) {
      tensor.shape.push_back(PyLong_AsLongLong(PySequence_Fast_GET_ITEM(shape, i)));
    }
    Py_DECREF(shape);
    if (PyErr_Occurred()) throw py::error_already_set();
    tensor.dtype = dtype_of(dtype);
    span.count = tensor.elements();
    submission.spec.tensors.push_back(std::move(tensor));
    submission.spans.push_back(span);
    if (items == 6) [[unlikely]] {
      const long device = PyLong_AsLong(PyTuple_GET_ITEM(tuple, 4));
      const size_t stream = PyLong_AsSize_t(PyTuple_GET_ITEM(tuple, 5));
      if (PyErr_Occurred()) throw py::error_already_set();
      put_on_device(submission, static_cast<int>(device), stream);
    }
    if ((items == 6) != (submission.on_device != nullptr)) throw py::value_error(kDevicesDiffer);
  }

  template <typename Action>
  void with_set(int process_set, Action&& action) {
    const py::gil_scoped_release release;
    if (const std::shared_ptr<Communicator> communicator = engine_->communicator(process_set)) action(*communicator);
  }

  const int process_ = getpid();
  std::unique_ptr<Engine> engine_;
  // What must live until an operation is over, because the engine reads and writes its memory; both guarded by the GIL.
  std::vector<Abandoned> abandoned_;  // of operations for which nobody will wait
  std::deque<Abandoned> on_device_;   // of those that were waited for, until the device has passed them
};

// An operation in flight. It ends when result() has returned or raised what became of it; a signal's handler that
// raises meanwhile leaves it as it was. Members are guarded by the GIL.
class PyHandle {
 public:
  PyHandle(std::shared_ptr<PyEngine> engine, std::shared_ptr<Submission> submission, py::object keep, py::object finish)
      : engine_(std::move(engine)),
        submission_(std::move(submission)),
        keep_(std::move(keep)),
        finish_(std::move(finish)) {}
  PyHandle(const PyHandle&) = delete;
  PyHandle& operator=(const PyHandle&) = delete;
  ~PyHandle() {
    if (submission_) engine_->abandon(std::move(submission_), std::move(keep_));
  }

  bool done() const {
    if (!submission_)
      throw py::value_error("The handle was not created or has been cleared: it was synchronized before.");
    return engine_->over(*submission_);
  }

  // The GPU of its tensors; none when they are the host's, and after the end.
  std::optional<int> device() const {
    if (!submission_ || !submission_->on_device) return std::nullopt;
    return submission_->on_device->ordinal;
  }

  py::object result(std::optional<uintptr_t> stream) {
    const std::shared_ptr<Submission> submission = submission_;
    if (!submission) return py::none();
    engine_->await(*submission);
    if (!submission_) return py::none();  // another thread was faster
    submission_.reset();
    const py::object keep = std::move(keep_), finish = std::move(finish_);
    py::object received;
    if (submission->on_device) [[unlikely]] {
      received = engine_->hand_over(submission, stream.value_or(submission->on_device->stream), keep);
    } else {
      received = PyEngine::result_of(*submission);
    }
    if (!finish.is_none()) return finish(std::move(received));
    return keep.is_none() ? received : keep;
  }

 private:
  const std::shared_ptr<PyEngine> engine_;
  std::shared_ptr<Submission> submission_;  // null: it has ended
  py::object keep_;
  py::object finish_;
};

std::unique_ptr<PyHandle> PyEngine::submit(int kind, std::string name, const py::sequence& tensors, int reduce_op,
                                           double prescale, double postscale, int root, const py::object& splits,
                                           int process_set, bool wait_follows, py::object keep, py::object finish) {
  std::shared_ptr<Submission> submission =
      make_submission(kind, std::move(name), tensors, reduce_op, prescale, postscale, root, splits, process_set);
  Status status;
  {
    const py::gil_scoped_release release;
    status = engine_->start(submission, wait_follows);
  }
  if (!status.ok()) raise_status(status);
  return std::make_unique<PyHandle>(shared_from_this(), std::move(submission), std::move(keep), std::move(finish));
}

}  // namespace
}  // namespace horovod

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
  module.def("set_error_types", [](const py::object& internal_error) {
    Py_XDECREF(g_internal_error);
    g_internal_error = internal_error.inc_ref().ptr();
  });

  py::class_<PySegment>(module, "Segment")
      .def(py::init([](bool in_process, const std::map<std::string, int64_t>& options) {
             Status status;
             PySegment segment{Segment::create(Engine::segment_bytes(config_from(options)), in_process, status)};
             if (!segment.segment) raise_status(status);
             return segment;
           }),
           py::kw_only(), py::arg("in_process") = false, py::arg("options") = std::map<std::string, int64_t>())
      .def_property_readonly("address", [](const PySegment& self) { return self.segment->address(); })
      .def(
          "await_attached",
          [](const PySegment& self, uint32_t peers, double timeout_seconds) {
            return self.segment->await_attached(peers, static_cast<int64_t>(timeout_seconds * 1e6));
          },
          py::arg("peers"), py::arg("timeout_seconds"), py::call_guard<py::gil_scoped_release>());

  py::class_<Output>(module, "Output", py::buffer_protocol())
      .def_buffer([](Output& self) {
        if (self.buffer.on_device) throw py::buffer_error("The result is on a GPU; take it with dlpack().");
        return py::buffer_info(self.buffer.data.get(), 1, py::format_descriptor<uint8_t>::format(),
                               static_cast<py::ssize_t>(self.buffer.bytes));
      })
      .def_property_readonly("shape", [](const Output& self) { return to_tuple(self.buffer.shape); })
      .def_property_readonly("nbytes", [](const Output& self) { return self.buffer.bytes; })
      .def("dlpack", [](Output& self) { return to_dlpack(std::exchange(self.buffer, {}), self.dtype); });

  py::class_<PyHandle>(module, "Handle")
      .def("done", &PyHandle::done)
      .def_property_readonly("device", &PyHandle::device)
      .def("result", &PyHandle::result, py::arg("stream") = py::none());

  py::class_<PyEngine, std::shared_ptr<PyEngine>>(module, "Engine")
      .def(py::init<int, int, uint64_t, std::vector<std::string>, const PySegment*, std::vector<std::string>,
                    std::optional<std::map<int, std::vector<int>>>, std::vector<int>,
                    const std::map<std::string, int64_t>&, std::string, std::string>(),
           py::kw_only(), py::arg("rank"), py::arg("size"), py::arg("epoch"), py::arg("labels"),
           py::arg("segment") = nullptr, py::arg("segment_addresses") = std::vector<std::string>(),
           py::arg("sockets") = py::none(), py::arg("hosts") = std::vector<int>(),
           py::arg("options") = std::map<std::string, int64_t>(), py::arg("cuda_file") = "", py::arg("nccl_file") = "")
      .def("submit", &PyEngine::submit, py::arg("kind"), py::arg("name"), py::arg("tensors"), py::arg("reduce_op") = 1,
           py::arg("prescale") = 1.0, py::arg("postscale") = 1.0, py::arg("root") = 0, py::arg("splits") = py::none(),
           py::arg("process_set") = 0, py::arg("wait_follows") = false, py::arg("keep") = py::none(),
           py::arg("finish") = py::none())
      .def("run", &PyEngine::run, py::arg("kind"), py::arg("name"), py::arg("tensors"), py::arg("reduce_op") = 1,
           py::arg("prescale") = 1.0, py::arg("postscale") = 1.0, py::arg("root") = 0, py::arg("splits") = py::none(),
           py::arg("process_set") = 0, py::arg("keep") = py::none())
      .def("add_process_set", &PyEngine::add_process_set, py::arg("number"), py::arg("ranks"), py::kw_only(),
           py::arg("segment") = nullptr, py::arg("segment_addresses") = std::vector<std::string>(),
           py::arg("sockets") = py::none(), py::arg("hosts") = std::vector<int>())
      .def("remove_process_set", &PyEngine::remove_process_set, py::arg("number"))
      .def("pending", &PyEngine::pending, py::arg("process_set"))
      .def("next_outbox", &PyEngine::next_outbox, py::arg("timeout_ms"))
      .def("join", &PyEngine::join)
      .def("apply_plan", &PyEngine::apply_plan, py::arg("process_set"), py::arg("name"), py::arg("id"),
           py::arg("operation") = py::none())
      .def("apply_error", &PyEngine::apply_error, py::arg("process_set"), py::arg("name"), py::arg("sentence"))
      .def("apply_recall", &PyEngine::apply_recall, py::arg("process_set"), py::arg("ids"))
      .def("standstill", &PyEngine::standstill)
      .def("apply_join", &PyEngine::apply_join, py::arg("rounds_over"), py::arg("ranks"), py::arg("phase"),
           py::arg("sentence"))
      .def("peer_left", &PyEngine::peer_left, py::arg("rank"), py::arg("sentence"))
      .def("abort", &PyEngine::abort, py::arg("sentence"))
      .def("check", &PyEngine::check)
      .def("close", &PyEngine::close, py::arg("sentence") = "")
      .def("counters", &PyEngine::counters)
      .def("start_timeline", &PyEngine::start_timeline, py::arg("path"), py::arg("mark_cycles"),
           py::arg("since_epoch_us"))
      .def("stop_timeline", &PyEngine::stop_timeline)
      .def("forget_timeline", &PyEngine::forget_timeline);
}
