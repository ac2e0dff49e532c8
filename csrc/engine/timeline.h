// The timeline of this rank: communicators record what happens to their operations, a thread of its own writes it.
//
// While no file is open, a hook costs one relaxed load (active()) or a look at Operation::traced. While one is, events
// go to a bounded queue; the engine never waits for the file, so when the writer does not keep up events are dropped,
// counted, and the count is written at the end. The file is a complete JSON array after each write.
//
// Locks: control_ (start and stop, one at a time), then mutex_, which is innermost: hooks may be called with any lock
// of the engine.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/status.h"
#include "collectives/topology.h"
#include "engine/mesh_order_log.h"
#include "engine/timeline_trace.h"

namespace horovod {

// A JSON array that is complete after each append() of elements. Does not own the descriptor.
class TimelineFile {
 public:
  TimelineFile(int descriptor, std::string path) : descriptor_(descriptor), path_(std::move(path)) {}
  Status append(const std::string& elements);

 private:
  int descriptor_;
  std::string path_;
  int64_t end_ = 0;  // where the next elements go
};

class Timeline {
 public:
  static constexpr size_t kQueueEvents = 1u << 16;

  Timeline() = default;
  Timeline(const Timeline&) = delete;
  Timeline& operator=(const Timeline&) = delete;
  ~Timeline();

  // Begins a new file, or the same one anew; a file that is being written is completed first, and goes on when the new
  // one can't be opened (invalid_argument). mark_cycles: also say when batches begin.
  Status start(const std::string& path, bool mark_cycles, int64_t start_since_epoch_us);
  // Completes the file. Fails when it could not be written to its end; running: there was one.
  Status stop(bool& running);
  // In a forked child, where the thread does not exist: lets go of the file without writing to it.
  void after_fork();

  // -- hooks; only where active() or the operation is traced ---------------------------------------------------------
  bool active() const { return active_.load(std::memory_order_relaxed); }
  // This rank submits the operation, or has got an id for it (or TimelineEvent::kNoId). ranks: of its process set.
  void begun(Operation& operation, TensorId id, const std::vector<int>& ranks);
  // The same and at once running(), in a world of one.
  void began_alone(Operation& operation, const DataPlane& plane, const std::vector<int>& ranks);
  void arrival(int process_set, int rank, TensorId id, Arrival what);
  // All have arrived; the batch begins. eager: without a data phase.
  void running(Batch batch, const DataPlane& plane, bool eager);
  void ended(const Operation& operation, const Status& status);

 private:
  void record(TimelineEvent&& event);
  void write(TimelineTrace trace, TimelineFile file);
  Status end_file(bool& running);

  std::atomic<bool> active_{false};
  std::atomic<bool> mark_cycles_{false};
  std::atomic<uint64_t> last_operation_{0};
  std::atomic<int> file_{-1};

  std::mutex control_;  // guards writer_
  std::thread writer_;  // joinable while there is a file

  std::mutex mutex_;  // guards the rest
  std::condition_variable filled_;
  std::vector<TimelineEvent> events_;
  uint64_t dropped_ = 0;
  bool stopping_ = false;
  Status written_;  // why the file is not complete
};

}  // namespace horovod
