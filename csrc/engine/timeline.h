// The timeline of this rank: communicators record what happens to their operations, a thread of its own writes it.
//
// While no file is open, a hook costs one relaxed load (active()) or a look at Operation::traced. While one is, events
// go to a bounded queue; the engine never waits for the file, so when the writer does not keep up events are dropped,
// counted, and the count is written at the end. The file is a complete JSON array after each write, also after one that
// failed. A file system that does not answer holds the writing thread, and no other one for longer than the patience.
//
// Locks: control_ (start and stop, one at a time), then Shared::mutex, which is innermost: hooks may be called with any
// lock of the engine.
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

#include "base/limits.h"
#include "base/status.h"
#include "collectives/batch.h"
#include "collectives/data_plane.h"
#include "engine/order_log.h"
#include "engine/timeline_trace.h"

namespace horovod {

// A JSON array that is complete after each append() of elements. Does not own the descriptor.
class TimelineFile {
 public:
  TimelineFile(int descriptor, std::string path) : descriptor_(descriptor), path_(std::move(path)) {}
  // Fails where there is no room (or for another reason); the array then ends as it did before, unless the message says
  // that this was not possible either.
  Status append(const std::string& elements);

 private:
  int write(const char* text, size_t bytes, int64_t place);

  int descriptor_;
  std::string path_;
  int64_t end_ = 0;  // where the next elements go
};

class Timeline {
 public:
  static constexpr size_t kQueueEvents = 1u << 16;

  // patience_us: how long start() and stop() wait for a file to be completed.
  explicit Timeline(int64_t patience_us = limits::kTimelineEndUs) : patience_us_(patience_us) {}
  Timeline(const Timeline&) = delete;
  Timeline& operator=(const Timeline&) = delete;
  ~Timeline();

  // Begins a new file, or the same one anew; a file that is being written is completed first, and goes on when the new
  // one can't be opened (invalid_argument), or when it can't be completed. mark_cycles: also say when batches begin.
  Status start(const std::string& path, bool mark_cycles, int64_t start_since_epoch_us);
  // Completes the file. Fails when it could not be written to its end, or (timeout) is not yet: nothing is added to it
  // any more, and the next stop() or start() waits again. running: there was one.
  Status stop(bool& running);
  // To be called in a forked child, where the writing thread does not exist: lets go of the file without writing to it.
  void after_fork();

  // -- hooks; only where active() or the operation is traced ---------------------------------------------------------
  bool active() const { return shared_->active.load(std::memory_order_relaxed); }
  // This rank submits the operation, or has got an id for it (or TimelineEvent::kNoId). ranks: of its process set.
  void begun(Operation& operation, TensorId id, const std::vector<int>& ranks);
  // The same and at once running(), in a world of one.
  void began_alone(Operation& operation, const DataPlane& plane, const std::vector<int>& ranks);
  void arrival(int process_set, int rank, TensorId id, Arrival what);
  // All ranks have arrived, and the batch begins. eager: it has no data phase.
  void running(Batch batch, const DataPlane& plane, bool eager);
  void ended(const Operation& operation, const Status& status);

 private:
  // What the writing thread uses, which may outlive the timeline.
  struct Shared {
    std::atomic<bool> active{false};  // set by start(), cleared by stop() and by the writer after an error; any order
    std::atomic<int> file{-1};        // the descriptor, which the writer or a forked child takes out and closes

    std::mutex mutex;                // guards the rest
    std::condition_variable filled;  // wakes the writer: many events are queued, or stopping is set
    std::condition_variable ended;   // wakes stop(): `over` is set
    std::vector<TimelineEvent> events;
    uint64_t dropped = 0;
    bool stopping = false;
    bool over = false;  // the writer has closed the file
    Status written;     // why the file is not complete
  };

  void record(TimelineEvent&& event);
  static void write(const std::shared_ptr<Shared>& shared, TimelineTrace trace, TimelineFile file,
                    const std::string& path);
  Status end_file(int64_t patience_us, bool& running);

  const int64_t patience_us_;
  const std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
  std::atomic<bool> mark_cycles_{false};     // any order: an option of the hooks
  std::atomic<uint64_t> last_operation_{0};  // any order: only counts

  std::mutex control_;  // guards the rest
  std::thread writer_;  // joinable while there is a file
  std::string path_;    // the path of that file
  bool late_ = false;   // a wait for that file to be completed was in vain
};

}  // namespace horovod
