#include "engine/timeline.h"

#include <cerrno>
#include <chrono>
#include <cstring>
#include <string_view>
#include <system_error>

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/limits.h"
#include "collectives/backend.h"

namespace horovod {
namespace {

constexpr size_t kWakeEvents = Timeline::kQueueEvents / 4;  // the writer wakes for so many events

Status failure(Code code, const std::string& path, int error) {
  return {code, error_code::timeline, "The timeline file " + path + " can't be written: " + std::strerror(error) + "."};
}

const char* plane_of(const DataPlane& plane) {
  return plane.backend ? "GLOO" : plane.mesh ? "TCP" : plane.region ? "SHM" : "LOCAL";
}

}  // namespace

// -- the file ---------------------------------------------------------------------------------------------------------

// Writes all bytes. Returns 0, or the errno that stopped it.
int TimelineFile::write(const char* text, size_t bytes, int64_t place) {
  while (bytes > 0) {
    const ssize_t written = ::pwrite(descriptor_, text, bytes, place);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return written < 0 ? errno : ENOSPC;
    text += written;
    bytes -= static_cast<size_t>(written);
    place += written;
  }
  return 0;
}

Status TimelineFile::append(const std::string& elements) {
  static constexpr std::string_view kEnd = "\n]\n";
  const std::string opening = end_ == 0 ? "[\n" : "";
  const std::string text = opening + elements + std::string(kEnd);
  // The bytes that replace the end of the array are written last, so that the array has an end until then, also where
  // the disk is full.
  const size_t kept = end_ == 0 ? 0 : kEnd.size();
  int error = write(text.data() + kept, text.size() - kept, end_ + static_cast<int64_t>(kept));
  if (error == 0) error = write(text.data(), kept, end_);
  if (error != 0) {
    Status status = failure(Code::internal, path_, error);
    const bool ends =
        write(kEnd.data(), kept, end_) == 0 && ::ftruncate(descriptor_, end_ + static_cast<int64_t>(kept)) == 0;
    return {status.code(),
            with_more(status.message(), ends ? " It ends with what was written before."
                                             : " It is no valid JSON: even what was begun can't be taken back.")};
  }
  end_ += static_cast<int64_t>(opening.size() + elements.size());  // the next elements replace the closing bracket
  return {};
}

Timeline::~Timeline() {
  bool running = false;
  const std::lock_guard<std::mutex> control(control_);
  (void)end_file(late_ ? 0 : patience_us_, running);
  if (writer_.joinable()) writer_.detach();  // the thread owns all that it uses, should it ever go on
}

Status Timeline::start(const std::string& path, bool mark_cycles, int64_t start_since_epoch_us) {
  const std::lock_guard<std::mutex> control(control_);
  // Opened without blocking, so that a pipe without a reader is an error and not a hang. Not truncated yet, as it may
  // be the current file.
  const int descriptor = ::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0666);
  if (descriptor < 0) return failure(Code::invalid_argument, path, errno);
  bool running = false;
  const Status last = end_file(patience_us_, running);
  if (writer_.joinable()) {
    ::close(descriptor);
    return {Code::invalid_argument, last.message()};
  }
  TimelineFile file(descriptor, path);
  const int64_t start_us = now_us();
  TimelineTrace trace(start_us, start_since_epoch_us);
  Status status;
  if (::ftruncate(descriptor, 0) != 0) {
    status = failure(Code::invalid_argument, path, errno);
  } else {
    status = file.append(trace.take());
  }
  if (!status.ok()) {
    ::close(descriptor);
    return {Code::invalid_argument, status.message()};
  }
  {
    const std::lock_guard<std::mutex> lock(shared_->mutex);
    shared_->events.clear();
    shared_->dropped = 0;
    shared_->stopping = shared_->over = false;
    shared_->written = Status();
  }
  shared_->file.store(descriptor);
  try {
    writer_ = std::thread(&Timeline::write, shared_, std::move(trace), std::move(file), path);
  } catch (const std::system_error& error) {
    ::close(shared_->file.exchange(-1));
    return failure(Code::invalid_argument, path, error.code().value());
  }
  pthread_setname_np(writer_.native_handle(), "hvd-timeline");
  path_ = path;
  mark_cycles_.store(mark_cycles, std::memory_order_relaxed);
  shared_->active.store(true, std::memory_order_relaxed);
  return {};
}

Status Timeline::stop(bool& running) {
  const std::lock_guard<std::mutex> control(control_);
  return end_file(patience_us_, running);
}

Status Timeline::end_file(int64_t patience_us, bool& running) {
  running = writer_.joinable();
  if (!running) return {};
  shared_->active.store(false, std::memory_order_relaxed);
  Status written;
  {
    std::unique_lock<std::mutex> lock(shared_->mutex);
    shared_->stopping = true;
    shared_->filled.notify_one();
    late_ = !shared_->ended.wait_for(lock, std::chrono::microseconds(patience_us), [&] { return shared_->over; });
    written = shared_->written;
  }
  if (late_) {
    return {Code::timeout, error_code::timeline,
            "The timeline file " + path_ + " is not complete after " + std::to_string(patience_us_ / 1'000) +
                " ms: its file system does not take the rest. A thread of its own goes on trying, and no "
                "other file is begun until that is over."};
  }
  writer_.join();  // the writer has nothing left to do
  return written;
}

void Timeline::after_fork() {
  shared_->active.store(false, std::memory_order_relaxed);
  if (const int descriptor = shared_->file.exchange(-1); descriptor >= 0) ::close(descriptor);
}

void Timeline::write(const std::shared_ptr<Shared>& shared, TimelineTrace trace, TimelineFile file,
                     const std::string& path) {
  std::vector<TimelineEvent> events;
  Status status;
  for (bool last = false; !last;) {
    uint64_t dropped = 0;
    {
      std::unique_lock<std::mutex> lock(shared->mutex);
      shared->filled.wait_for(lock, std::chrono::microseconds(limits::kTimelineWriteUs),
                              [&] { return shared->stopping || shared->events.size() >= kWakeEvents; });
      events.swap(shared->events);
      std::swap(dropped, shared->dropped);
      last = shared->stopping;
    }
    if (!status.ok()) {
      events.clear();
      continue;
    }
    for (const TimelineEvent& event : events) trace.add(event);
    events.clear();
    if (dropped > 0) trace.gap(dropped, now_us());
    if (last) trace.finish(now_us());
    if (const std::string text = trace.take(); !text.empty()) status = file.append(text);
    if (!status.ok()) shared->active.store(false, std::memory_order_relaxed);
  }
  if (const int descriptor = shared->file.exchange(-1); ::close(descriptor) != 0 && status.ok()) {
    status = failure(Code::internal, path, errno);
  }
  if (status.ok() && trace.dropped() > 0) {
    status = {Code::internal, error_code::timeline,
              "The timeline could not keep up: " + std::to_string(trace.dropped()) +
                  " events are missing, and the file says where."};
  }
  const std::lock_guard<std::mutex> lock(shared->mutex);
  shared->written = std::move(status);
  shared->over = true;
  shared->ended.notify_all();
}

// -- hooks ------------------------------------------------------------------------------------------------------------

void Timeline::record(TimelineEvent&& event) {
  Shared& shared = *shared_;
  bool wake = false;
  {
    const std::lock_guard<std::mutex> lock(shared.mutex);
    if (shared.stopping) return;
    if (shared.events.size() >= kQueueEvents) {
      ++shared.dropped;
      return;
    }
    event.time_us = now_us();
    shared.events.push_back(std::move(event));
    wake = shared.events.size() == kWakeEvents;
  }
  if (wake) shared.filled.notify_one();
}

void Timeline::begun(Operation& operation, TensorId id, const std::vector<int>& ranks) {
  const OpSpec& spec = operation.spec;
  TimelineEvent event;
  event.process_set = spec.process_set;
  event.id = id;
  if (operation.traced) {
    event.kind = TimelineEvent::planned;
  } else {
    operation.traced = last_operation_.fetch_add(1, std::memory_order_relaxed) + 1;
    event.kind = TimelineEvent::begun;
    event.type = spec.type;
    event.adasum = spec.type == OpType::allreduce && spec.reduce_op == ReduceOp::adasum;
    event.tensors = spec.tensors;
    event.text = spec.name;
    if (spec.process_set != 0) {
      for (size_t i = 0; i < ranks.size(); ++i) {
        event.text += (i == 0 ? " [ranks " : ", ") + std::to_string(ranks[i]);
      }
      event.text += ']';
    }
  }
  event.operation = operation.traced;
  record(std::move(event));
}

void Timeline::began_alone(Operation& operation, const DataPlane& plane, const std::vector<int>& ranks) {
  begun(operation, TimelineEvent::kNoId, ranks);
  Operation* one[] = {&operation};
  running(one, plane, false);
}

void Timeline::arrival(int process_set, int rank, TensorId id, Arrival what) {
  TimelineEvent event;
  event.kind = what == Arrival::counted ? TimelineEvent::arrived
               : what == Arrival::last  ? TimelineEvent::agreed
                                        : TimelineEvent::withdrawn;
  event.process_set = process_set;
  event.rank = rank;
  event.id = id;
  record(std::move(event));
}

void Timeline::running(Batch batch, const DataPlane& plane, bool eager) {
  if (mark_cycles_.load(std::memory_order_relaxed)) record({.kind = TimelineEvent::cycle});
  for (const Operation* operation : batch) {
    if (!operation->traced) continue;
    TimelineEvent event;
    event.kind = TimelineEvent::running;
    event.operation = operation->traced;
    event.eager = eager;
    event.plane = batch[0]->on_device && plane.device->takes_nccl(operation->spec) ? "NCCL" : plane_of(plane);
    record(std::move(event));
  }
}

void Timeline::ended(const Operation& operation, const Status& status) {
  if (!active()) return;
  TimelineEvent event;
  event.kind = TimelineEvent::ended;
  event.operation = operation.traced;
  event.text = status.message();
  record(std::move(event));
}

}  // namespace horovod
