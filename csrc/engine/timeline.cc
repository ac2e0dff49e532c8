#include "engine/timeline.h"

#include <cerrno>
#include <chrono>
#include <cstring>
#include <system_error>

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include "base/clock.h"

namespace horovod {
namespace {

constexpr int64_t kWriteEveryMs = 100;
constexpr size_t kWakeEvents = Timeline::kQueueEvents / 4;  // so many are written at once

Status failure(Code code, const std::string& path, int error) {
  return {code, "The timeline file " + path + " can't be written: " + std::strerror(error) + "."};
}

const char* plane_of(const DataPlane& plane) {
  return plane.backend ? "GLOO" : plane.mesh ? "TCP" : plane.region ? "SHM" : "LOCAL";
}

}  // namespace

// -- the file ---------------------------------------------------------------------------------------------------------

Status TimelineFile::append(const std::string& elements) {
  const std::string opening = end_ == 0 ? "[\n" : "";
  const std::string text = opening + elements + "\n]\n";
  for (size_t done = 0; done < text.size();) {
    const ssize_t written =
        ::pwrite(descriptor_, text.data() + done, text.size() - done, end_ + static_cast<int64_t>(done));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return failure(Code::internal, path_, written < 0 ? errno : ENOSPC);
    done += static_cast<size_t>(written);
  }
  end_ += static_cast<int64_t>(opening.size() + elements.size());  // the next ones replace the bracket
  return {};
}

Timeline::~Timeline() {
  bool running = false;
  (void)stop(running);
}

Status Timeline::start(const std::string& path, bool mark_cycles, int64_t start_since_epoch_us) {
  const std::lock_guard<std::mutex> control(control_);
  // Not blocking: a pipe that nobody reads is an error, not a hang. Not truncated yet: it may be the current one.
  const int descriptor = ::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0666);
  if (descriptor < 0) return failure(Code::invalid_argument, path, errno);
  bool running = false;
  (void)end_file(running);
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
    const std::lock_guard<std::mutex> lock(mutex_);
    events_.clear();
    dropped_ = 0;
    stopping_ = false;
    written_ = Status();
  }
  try {
    writer_ = std::thread(&Timeline::write, this, std::move(trace), std::move(file));
  } catch (const std::system_error& error) {
    ::close(descriptor);
    return failure(Code::invalid_argument, path, error.code().value());
  }
  pthread_setname_np(writer_.native_handle(), "hvd-timeline");
  file_.store(descriptor);
  mark_cycles_.store(mark_cycles, std::memory_order_relaxed);
  active_.store(true, std::memory_order_relaxed);
  return {};
}

Status Timeline::stop(bool& running) {
  const std::lock_guard<std::mutex> control(control_);
  return end_file(running);
}

Status Timeline::end_file(bool& running) {
  running = writer_.joinable();
  if (!running) return {};
  active_.store(false, std::memory_order_relaxed);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  filled_.notify_one();
  writer_.join();
  if (::close(file_.exchange(-1)) != 0 && written_.ok()) {
    return {Code::internal, std::string("A timeline file could not be closed: ") + std::strerror(errno) + "."};
  }
  return written_;
}

void Timeline::after_fork() {
  active_.store(false, std::memory_order_relaxed);
  if (const int descriptor = file_.exchange(-1); descriptor >= 0) ::close(descriptor);
}

void Timeline::write(TimelineTrace trace, TimelineFile file) {
  std::vector<TimelineEvent> events;
  Status status;
  for (bool last = false; !last;) {
    uint64_t dropped = 0;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      filled_.wait_for(lock, std::chrono::milliseconds(kWriteEveryMs),
                       [&] { return stopping_ || events_.size() >= kWakeEvents; });
      events.swap(events_);
      std::swap(dropped, dropped_);
      last = stopping_;
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
    if (!status.ok()) active_.store(false, std::memory_order_relaxed);
  }
  if (status.ok() && trace.dropped() > 0) {
    status = {Code::internal, "The timeline could not keep up: " + std::to_string(trace.dropped()) +
                                  " events are missing, and the file says where."};
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  written_ = std::move(status);
}

// -- hooks ------------------------------------------------------------------------------------------------------------

void Timeline::record(TimelineEvent&& event) {
  bool wake = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (stopping_) return;
    if (events_.size() >= kQueueEvents) {
      ++dropped_;
      return;
    }
    event.time_us = now_us();
    events_.push_back(std::move(event));
    wake = events_.size() == kWakeEvents;
  }
  if (wake) filled_.notify_one();
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
