// What the Python class Engine does; clients/horovod/_core.pyi is its documentation. Nothing is decided here: arguments
// become records, blocking calls release the GIL, statuses become exceptions.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/c_engine.h"
#include "bindings/dlpack.h"
#include "bindings/tensor_reader.h"
#include "engine/engine.h"

namespace horovod {

pybind11::tuple to_tuple(const std::vector<int64_t>& values);

struct PySegment {
  std::shared_ptr<Segment> segment;
};

struct Output {
  OutputBuffer buffer;
  DType dtype;
};

class PyEngine {
 public:
  PyEngine(int rank, int size, uint64_t epoch, std::vector<std::string> labels, const PySegment* segment,
           std::vector<std::string> segment_addresses, std::optional<std::map<int, std::vector<int>>> sockets,
           std::vector<int> hosts, std::vector<int> placement, const std::map<std::string, int64_t>& options,
           std::string cuda_file, std::string nccl_file, std::string nvrtc_file,
           const std::map<int, std::string>& wire_keys);
  ~PyEngine();
  PyEngine(const PyEngine&) = delete;
  PyEngine& operator=(const PyEngine&) = delete;

  // -- operations (bindings/operations.cc makes and ends them)
  void start(const std::shared_ptr<Submission>& submission, Start start);
  // start() and a first wait, while signals need no look: the GIL changes hands once. await() must follow.
  void start_and_wait(const std::shared_ptr<Submission>& submission);
  // Waits until the operation is done, or a signal's handler raises or has raised.
  void await(Submission& submission);
  // No caller will wait for the operation any more; the memory that it uses is kept until it is over.
  void abandon(std::shared_ptr<Submission> submission, pybind11::object keep);
  // A new reference to the engine, for callers in C.
  HorovodEngine* c_engine() const { return make_c_engine(engine_); }
  // Whether a wait for the operation would end at once.
  bool over(const Submission& submission) const { return engine_->over(submission); }
  // The results of an operation that is done; called once. Results in engine memory are tensors if the reader makes
  // them, else Output.
  pybind11::object result_of(const std::shared_ptr<Submission>& submission, std::optional<uintptr_t> stream,
                             const pybind11::object& keep, const Owners& owners, const TensorReader* reader);

  // -- process sets
  void add_process_set(int number, std::vector<int> ranks, const PySegment* segment,
                       std::vector<std::string> segment_addresses,
                       std::optional<std::map<int, std::vector<int>>> sockets, std::vector<int> hosts,
                       const std::map<int, std::string>& wire_keys);
  void remove_process_set(int number);
  int64_t pending(int process_set);

  // -- negotiation
  pybind11::object next_outbox(int64_t timeout_ms);
  void apply_plan(int process_set, const std::string& name, uint32_t id, const pybind11::object& operation);
  void apply_error(int process_set, const std::string& name, const std::string& sentence);
  void apply_failures(const std::vector<std::tuple<int, std::string, std::string>>& errors,
                      const std::vector<std::pair<int, std::vector<uint32_t>>>& recalls);
  void apply_recall(int process_set, const std::vector<uint32_t>& ids);
  void apply_join(uint32_t round, const std::vector<int>& ranks, int phase, const std::string& sentence);
  // Waits until all ranks have joined, or a signal's handler raises. device: for zeros, if this rank has used none yet.
  int join(int device);
  BlockedReport blocked_report();

  // -- life
  void peer_left(int rank, const std::string& sentence);
  void abort(const std::string& sentence);
  pybind11::object lost_peer() const;
  // Why the engine must be kept for ever; "": it has ended.
  std::string close(const std::string& sentence, bool keep);
  std::map<int, int> kept_sockets();  // descriptors of kept connections by rank; they are the caller's from now on
  void check() const;
  void check_results() const;
  std::map<std::string, uint64_t> counters() const { return engine_->counters(); }
  size_t known() const { return engine_->known(); }

  void start_timeline(const std::string& path, bool mark_cycles, int64_t since_epoch_us);
  // Whether a timeline was being written, and what went wrong with it.
  std::pair<bool, std::string> stop_timeline();
  void forget_timeline() { engine_->timeline().after_fork(); }

 private:
  bool wait_slice(Submission& submission, int64_t us);
  void await_device(const Submission& submission);
  template <typename Action>
  void with_set(int process_set, Action&& action);

  const int process_ = getpid();
  std::shared_ptr<Engine> engine_;  // callers in C have weak references
};

}  // namespace horovod
