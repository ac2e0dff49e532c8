#include "bindings/engine.h"

#include <tuple>

#include "base/interrupt.h"
#include "base/limits.h"
#include "bindings/errors.h"
#include "bindings/impatience.h"
#include "bindings/options.h"
#include "bindings/remembered.h"
#include "bindings/spec.h"
#include "bindings/tensor_reader.h"
#include "engine/waiting_thread.h"

namespace py = pybind11;

namespace horovod {
namespace {

// Called by a driving thread that waits for a peer. The pending Python exception stays set for the caller of wait().
bool signal_pending() {
  const py::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0;
}

py::tuple describe(const OpSpec& spec, int process_set) {
  py::list tensors;
  for (const TensorSpec& tensor : spec.tensors) {
    tensors.append(py::make_tuple(static_cast<int>(tensor.dtype), to_tuple(tensor.shape)));
  }
  return py::make_tuple(spec.name, static_cast<int>(spec.type), tensors, static_cast<int>(spec.reduce_op),
                        spec.prescale, spec.postscale, spec.root, process_set, static_cast<int>(spec.device));
}

bool interpreter_ends() {
#if PY_VERSION_HEX >= 0x030D0000
  return !Py_IsInitialized() || Py_IsFinalizing();
#else
  return !Py_IsInitialized() || _Py_IsFinalizing();
#endif
}

// A reference that the engine may let go of on any thread. Before 3.14 Python ends a thread that asks for the GIL while
// the interpreter ends, and it does so by unwinding: in a deleter, which may not throw, that would abort the process.
KeepAlive keep_alive(py::object object) {
  return {object.release().ptr(), [](void* reference) {
            if (interpreter_ends()) return;  // the interpreter frees all objects with itself
            const py::gil_scoped_acquire gil;
            Py_XDECREF(static_cast<PyObject*>(reference));
          }};
}

// Keys in the order in which worker/runtime/handshake.py makes them: first the one for sending.
std::map<int, wire::Keys> keys_from(const std::map<int, std::string>& given) {
  std::map<int, wire::Keys> keys;
  for (const auto& [descriptor, bytes] : given) {
    if (bytes.size() != 2 * crypto::kKeyBytes) refuse(error_code::internal, "The keys of a connection have 64 bytes.");
    wire::Keys& made = keys[descriptor];
    std::memcpy(made.send.data(), bytes.data(), crypto::kKeyBytes);
    std::memcpy(made.receive.data(), bytes.data() + crypto::kKeyBytes, crypto::kKeyBytes);
  }
  return keys;
}

}  // namespace

py::tuple to_tuple(const std::vector<int64_t>& values) {
  py::tuple result(values.size());
  for (size_t i = 0; i < values.size(); ++i) result[i] = values[i];
  return result;
}

PyEngine::PyEngine(int rank, int size, uint64_t epoch, std::vector<std::string> labels, const PySegment* segment,
                   std::vector<std::string> segment_addresses, std::optional<std::map<int, std::vector<int>>> sockets,
                   std::vector<int> hosts, std::vector<int> placement, const std::map<std::string, int64_t>& options,
                   std::string cuda_file, std::string nccl_file, std::string nvrtc_file,
                   const std::map<int, std::string>& wire_keys) {
  if (static_cast<int>(labels.size()) != size) refuse(error_code::internal, "labels must name every rank.");
  WorldSpec world;
  world.rank = rank;
  world.epoch = epoch;
  world.labels = std::move(labels);
  if (segment) world.segment = segment->segment;
  world.segment_addresses = std::move(segment_addresses);
  if (sockets) world.sockets = std::move(*sockets);
  world.keys = keys_from(wire_keys);
  world.hosts = std::move(hosts);
  world.placement = std::move(placement);
  Config config = config_from(options);
  config.cuda_file = std::move(cuda_file);
  config.nccl_file = std::move(nccl_file);
  config.nvrtc_file = std::move(nvrtc_file);
  Status status;
  {
    const py::gil_scoped_release release;
    engine_ = {Engine::create(std::move(world), config, status).release(),
               [](Engine* engine) { Engine::dispose(std::unique_ptr<Engine>(engine)); }};
  }
  if (!engine_) raise_status(status);
}

PyEngine::~PyEngine() {
  Remembered<PyEngine>::forget(this);
  const py::gil_scoped_release release;
  if (process_ == getpid()) (void)engine_->close("");
  engine_.reset();
}

// -- operations -------------------------------------------------------------------------------------------------------

void PyEngine::start(const std::shared_ptr<Submission>& submission, Start start) {
  Status status;
  {
    const py::gil_scoped_release release;
    status = engine_->start(submission, start);
  }
  if (!status.ok()) raise_status(status);
}

bool PyEngine::wait_slice(Submission& submission, int64_t us) {
  t_interrupt_hook = &signal_pending;
  const bool done = engine_->wait(submission, us);
  t_interrupt_hook = nullptr;
  return done;
}

void PyEngine::start_and_wait(const std::shared_ptr<Submission>& submission) {
  const WaitingThread::Wait counted;  // counts this thread among those that may be blocked
  const int64_t slice_us = Impatience::slice_us(0, limits::kSignalCheckUs);
  Status status;
  {
    const py::gil_scoped_release release;
    status = engine_->start(submission, Start::by_waiter);
    if (status.ok()) wait_slice(*submission, slice_us);
  }
  if (!status.ok()) raise_status(status);
}

void PyEngine::await(Submission& submission) {
  WaitingThread::Wait waiting;
  Impatience impatience;
  while (!PyErr_Occurred() && !submission.is_done() && PyErr_CheckSignals() == 0) {
    const int64_t slice_us = impatience.slice_us(limits::kSignalCheckUs);
    bool done;
    {
      const py::gil_scoped_release release;
      done = wait_slice(submission, slice_us);
    }
    if (done) continue;
    impatience.tell(submission);
    if (impatience.waited_us() >= limits::kSignalCheckUs) waiting.blocked();
  }
  if (PyErr_Occurred()) throw py::error_already_set();
  if (submission.on_device) [[unlikely]]
    await_device(submission);
}

// Waits until the device has the result, if the host is to wait for devices.
void PyEngine::await_device(const Submission& submission) {
  while (!engine_->over(submission)) {
    {
      const py::gil_scoped_release release;
      nap(limits::kDeviceResultNapUs);
    }
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
}

void PyEngine::abandon(std::shared_ptr<Submission> submission, py::object keep) {
  if (process_ != getpid()) return;  // nothing runs in a forked child
  engine_->abandon(std::move(submission), keep_alive(std::move(keep)));
}

py::object PyEngine::result_of(const std::shared_ptr<Submission>& submission, std::optional<uintptr_t> stream,
                               const py::object& keep, const Owners& owners, const TensorReader* reader) {
  const Status status = engine_->collect(submission, stream, [&] { return keep_alive(bundle(keep, owners)); });
  if (!status.ok()) raise_status(status);
  if (submission->outputs.empty() || !submission->outputs[0].data) return py::none();
  py::list outputs;
  for (size_t i = 0; i < submission->outputs.size(); ++i) {
    OutputBuffer& buffer = submission->outputs[i];
    const DType dtype = submission->spec.tensors[i].dtype;
    if (reader && reader->makes(buffer, dtype)) {
      outputs.append(reader->make(std::move(buffer), dtype));
    } else {
      outputs.append(py::cast(Output{std::move(buffer), dtype}));
    }
  }
  if (submission->spec.type == OpType::alltoall) {
    return py::make_tuple(outputs, py::cast(submission->received_splits));
  }
  return outputs;
}

// -- process sets -----------------------------------------------------------------------------------------------------

void PyEngine::add_process_set(int number, std::vector<int> ranks, const PySegment* segment,
                               std::vector<std::string> segment_addresses,
                               std::optional<std::map<int, std::vector<int>>> sockets, std::vector<int> hosts,
                               const std::map<int, std::string>& wire_keys) {
  ProcessSetSpec spec;
  spec.number = number;
  spec.ranks = std::move(ranks);
  if (segment) spec.segment = segment->segment;
  spec.segment_addresses = std::move(segment_addresses);
  if (sockets) spec.sockets = std::move(*sockets);
  spec.keys = keys_from(wire_keys);
  spec.hosts = std::move(hosts);
  Status status;
  {
    const py::gil_scoped_release release;
    status = engine_->add_process_set(std::move(spec));
  }
  if (!status.ok()) raise_status(status);
}
void PyEngine::remove_process_set(int number) {
  const py::gil_scoped_release release;
  engine_->remove_process_set(number);
}
int64_t PyEngine::pending(int process_set) {
  const py::gil_scoped_release release;
  return engine_->pending(process_set);
}

// -- negotiation ------------------------------------------------------------------------------------------------------

template <typename Action>
void PyEngine::with_set(int process_set, Action&& action) {
  const py::gil_scoped_release release;
  if (const std::shared_ptr<Communicator> communicator = engine_->communicator(process_set)) action(*communicator);
}

py::object PyEngine::next_outbox(int64_t timeout_ms) {
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
    } else if (item.kind == OutboxItem::lost) {
      result.append(py::make_tuple("lost", py::make_tuple(item.rank, item.process_ended)));
    } else if (item.kind == OutboxItem::note) {
      result.append(py::make_tuple("note", py::make_tuple(item.worth_saying, item.sentence)));
    } else if (item.kind == OutboxItem::blocked) {
      result.append(
          py::make_tuple("blocked", describe(item.spec, item.process_set) +
                                        py::make_tuple(item.number, static_cast<double>(item.waited_us) * 1e-6)));
    } else {
      result.append(py::make_tuple("announce", describe(item.spec, item.process_set)));
    }
  }
  return result;
}

namespace {

// Zeros of these shapes will be allocated and computed with, so sizes must not be negative, and the sum of bytes must
// fit a number.
void check_tensors(const OpSpec& spec) {
  if (spec.tensors.empty() && !traits_of(spec.type).no_tensors)
    refuse(error_code::internal, "An operation has no tensors.");
  int64_t sum = 0;
  for (const TensorSpec& tensor : spec.tensors) {
    auto bytes = static_cast<int64_t>(size_of(tensor.dtype));
    bool fits = true;
    for (const int64_t dimension : tensor.shape) {
      fits = fits && dimension >= 0 && !__builtin_mul_overflow(bytes, dimension, &bytes);
    }
    if (!fits || __builtin_add_overflow(sum, bytes, &sum)) {
      refuse(error_code::internal, "A tensor has a shape that can't be.");
    }
  }
}

}  // namespace

void PyEngine::apply_plan(int process_set, const std::string& name, uint32_t id, const py::object& operation) {
  OpSpec spec;
  if (!operation.is_none()) {
    const auto [kind, tensors, reduce_op, prescale, postscale, device] =
        operation.cast<std::tuple<int, std::vector<std::pair<int, std::vector<int64_t>>>, int, double, double, int>>();
    spec = make_spec(kind, reduce_op, prescale, postscale, 0, process_set);
    spec.name = name;
    if (device < 0 || device > static_cast<int>(DeviceKind::gpu))
      refuse(error_code::internal, "Unknown kind of device.");
    spec.device = static_cast<DeviceKind>(device);
    for (const auto& [dtype, shape] : tensors) spec.tensors.push_back({dtype_of(dtype), shape});
    check_tensors(spec);
  }
  const OpSpec* known = operation.is_none() ? nullptr : &spec;
  with_set(process_set, [&](Communicator& communicator) { communicator.apply_plan(name, id, known); });
}
void PyEngine::apply_error(int process_set, const std::string& name, const std::string& sentence) {
  with_set(process_set, [&](Communicator& communicator) { communicator.apply_error(name, sentence); });
}
// First all process sets lose the ids that are idle here: a thread that is told of an error in one set may go on in
// another one.
void PyEngine::apply_failures(const std::vector<std::tuple<int, std::string, std::string>>& errors,
                              const std::vector<std::pair<int, std::vector<uint32_t>>>& recalls) {
  std::map<int, std::pair<std::vector<std::pair<std::string, std::string>>, std::vector<TensorId>>> left;
  for (const auto& [process_set, ids] : recalls) {
    with_set(process_set, [&, number = process_set](Communicator& communicator) {
      const std::vector<TensorId> busy = communicator.apply_recall_of_idle(ids);
      std::vector<TensorId>& others = left[number].second;
      others.insert(others.end(), busy.begin(), busy.end());
    });
  }
  for (const auto& [process_set, name, sentence] : errors) left[process_set].first.emplace_back(name, sentence);
  for (const auto& [process_set, told] : left) {
    with_set(process_set, [&](Communicator& communicator) { communicator.apply_errors(told.first, told.second); });
  }
}
void PyEngine::apply_recall(int process_set, const std::vector<uint32_t>& ids) {
  with_set(process_set, [&](Communicator& communicator) { communicator.apply_recall(ids); });
}

void PyEngine::apply_join(uint32_t round, const std::vector<int>& ranks, int phase, const std::string& sentence) {
  if (phase < 0 || phase > static_cast<int>(JoinPhase::over)) refuse(error_code::internal, "Unknown phase of a join.");
  with_set(0, [&](Communicator& communicator) {
    communicator.apply_join(round, ranks, static_cast<JoinPhase>(phase), sentence);
  });
}

int PyEngine::join(int device) {
  if (device >= 0) {
    const py::gil_scoped_release release;
    engine_->join_from(device);
  }
  WaitingThread::Wait waiting;
  Impatience impatience;
  int64_t ticket = Communicator::kNoTicket;
  for (int last_rank = -1;;) {
    const bool has_joined = ticket != Communicator::kNoTicket;
    const int64_t slice_us = has_joined ? limits::kSignalCheckUs : impatience.slice_us(limits::kSignalCheckUs);
    Status status;
    {
      const py::gil_scoped_release release;
      t_interrupt_hook = &signal_pending;
      status = engine_->communicator(0)->join(slice_us, ticket, last_rank);
      t_interrupt_hook = nullptr;
    }
    if (PyErr_Occurred() || PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (!status.ok()) raise_status(status);
    if (last_rank >= 0) return last_rank;
    if (ticket == Communicator::kNoTicket) impatience.tell(0);
    if (has_joined || impatience.waited_us() >= limits::kSignalCheckUs) waiting.blocked();
  }
}

BlockedReport PyEngine::blocked_report() {
  const py::gil_scoped_release release;
  return engine_->blocked_report();
}

// -- life -------------------------------------------------------------------------------------------------------------

void PyEngine::peer_left(int rank, const std::string& sentence) {
  const py::gil_scoped_release release;
  engine_->peer_left(rank, sentence);
}
void PyEngine::abort(const std::string& sentence) {
  const py::gil_scoped_release release;
  engine_->abort(sentence);
}
py::object PyEngine::lost_peer() const {
  const auto [rank, process_ended] = engine_->lost_peer();
  if (rank < 0) return py::none();
  return py::make_tuple(rank, process_ended);
}
std::string PyEngine::close(const std::string& sentence, bool keep) {
  const py::gil_scoped_release release;
  return engine_->close(sentence, keep).message();
}
std::map<int, int> PyEngine::kept_sockets() {
  std::map<int, int> descriptors;
  for (KeptSocket& kept : engine_->kept_sockets()) descriptors[kept.peer] = kept.socket.release();
  return descriptors;
}
void PyEngine::check() const {
  if (const Status status = engine_->ended(); !status.ok()) raise_status(status);
}
void PyEngine::check_results() const {
  if (const Status status = engine_->results(); !status.ok()) raise_status(status);
}

void PyEngine::start_timeline(const std::string& path, bool mark_cycles, int64_t since_epoch_us) {
  Status status;
  {
    const py::gil_scoped_release release;
    status = engine_->timeline().start(path, mark_cycles, since_epoch_us);
  }
  if (!status.ok()) raise_status(status);
}

std::pair<bool, std::string> PyEngine::stop_timeline() {
  const py::gil_scoped_release release;
  bool running = false;
  const Status status = engine_->timeline().stop(running);
  return {running, status.message()};
}

}  // namespace horovod
