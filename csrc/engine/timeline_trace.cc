#include "engine/timeline_trace.h"

#include <algorithm>
#include <cstdio>

namespace horovod {
namespace {

constexpr size_t kShapesShown = 16;  // how many shapes of a grouped operation the trace shows

std::string quoted(const std::string& text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      result += '\\';
      result += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char escaped[8];
      std::snprintf(escaped, sizeof escaped, "\\u%04x", c);
      result += escaped;
    } else {
      result += c;
    }
  }
  return result + '"';
}

// The shape as "[2, 3]"; the shapes of a group one after the other.
std::string shapes_of(const std::vector<TensorSpec>& tensors) {
  std::string text;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (i > 0) text += ", ";
    if (i == kShapesShown) return text + "... (" + std::to_string(tensors.size()) + " tensors)";
    text += '[';
    for (size_t d = 0; d < tensors[i].shape.size(); ++d) {
      text += (d > 0 ? ", " : "") + std::to_string(tensors[i].shape[d]);
    }
    text += ']';
  }
  return text;
}

std::string dtypes_of(const std::vector<TensorSpec>& tensors) {
  const bool uniform = std::all_of(tensors.begin(), tensors.end(),
                                   [&](const TensorSpec& tensor) { return tensor.dtype == tensors[0].dtype; });
  return tensors.empty() ? "" : uniform ? name_of(tensors[0].dtype) : "mixed";
}

}  // namespace

TimelineTrace::TimelineTrace(int64_t start_us, int64_t start_since_epoch_us) : start_us_(start_us), last_us_(start_us) {
  text_ = R"({"name":"process_name","ph":"M","pid":0,"args":{"name":"Horovod","start_time_since_epoch_in_micros":)" +
          std::to_string(start_since_epoch_us) + "}},\n" +
          R"({"name":"process_sort_index","ph":"M","pid":0,"args":{"sort_index":0}})";
}

void TimelineTrace::add(const TimelineEvent& event) {
  last_us_ = std::max(last_us_, event.time_us);
  const Key key{event.process_set, event.id};
  switch (event.kind) {
    case TimelineEvent::begun:
      begin(event);
      break;
    case TimelineEvent::planned:
      if (Open* open = find(event.operation)) {
        open->key = key;
        operation_of_[key] = event.operation;
        for (const auto& [rank, time_us] : arrivals_[key]) tick(*open, rank, std::max(time_us, open->since_us));
      }
      break;
    case TimelineEvent::arrived:
      arrivals_[key][event.rank] = event.time_us;
      // Where all ranks have arrived already, that was the previous run of the id, and the tick belongs to the next
      // one.
      if (Open* open = find(key); open && open->agreed_us < 0) tick(*open, event.rank, event.time_us);
      break;
    case TimelineEvent::withdrawn:
      arrivals_[key].erase(event.rank);
      break;
    case TimelineEvent::agreed:
      arrivals_.erase(key);
      if (Open* open = find(key)) agree(*open, event.time_us);
      break;
    case TimelineEvent::cycle:
      write(0, 'i', "CYCLE_START", event.time_us, R"(,"s":"g")");
      break;
    case TimelineEvent::running:
      if (Open* open = find(event.operation)) run(*open, event);
      break;
    case TimelineEvent::ended:
      if (Open* open = find(event.operation)) {
        end(*open, event.time_us, event.text);
        open_.erase(event.operation);
      }
      break;
  }
}

void TimelineTrace::begin(const TimelineEvent& event) {
  Open open;
  open.pid = process_for(event.text);
  open.key = {event.process_set, event.id};
  open.op = event.adasum ? "ADASUM" : name_of(event.type);
  open.wire_op = event.adasum ? "ADASUM_ALLREDUCE" : event.type == OpType::broadcast ? "BCAST" : open.op;
  open.tensors = R"("dtype":)" + quoted(dtypes_of(event.tensors)) + R"(,"shape":)" + quoted(shapes_of(event.tensors));
  open.since_us = event.time_us;
  const bool planned = event.id != TimelineEvent::kNoId;
  if (planned) {
    operation_of_[open.key] = event.operation;
    for (const auto& [rank, time_us] : arrivals_[open.key]) open.since_us = std::min(open.since_us, time_us);
  }
  write(open.pid, 'B', "NEGOTIATE_" + open.op, open.since_us);
  if (planned) {
    for (const auto& [rank, time_us] : arrivals_[open.key]) tick(open, rank, time_us);
  }
  open_[event.operation] = std::move(open);
}

void TimelineTrace::agree(Open& open, int64_t time_us) {
  if (open.agreed_us >= 0) return;
  open.agreed_us = std::max(time_us, open.since_us);
  write(open.pid, 'E', "NEGOTIATE_" + open.op, open.agreed_us);
  write(open.pid, 'B', open.op, open.agreed_us);
}

void TimelineTrace::run(Open& open, const TimelineEvent& event) {
  agree(open, event.time_us);
  int64_t since_us = open.agreed_us;  // small data are under way from the agreement on
  if (!event.eager && event.time_us > since_us) {
    write(open.pid, 'B', "QUEUE", since_us);
    write(open.pid, 'E', "QUEUE", event.time_us);
    since_us = event.time_us;
  }
  open.activity = event.plane + std::string(event.eager ? "_EAGER_" : "_") + open.wire_op;
  write(open.pid, 'B', open.activity, since_us);
}

void TimelineTrace::end(Open& open, int64_t time_us, const std::string& why) {
  if (!open.activity.empty()) write(open.pid, 'E', open.activity, time_us);
  write(open.pid, 'E', open.agreed_us < 0 ? "NEGOTIATE_" + open.op : open.op, time_us,
        R"(,"args":{)" + open.tensors + (why.empty() ? "" : R"(,"error":)" + quoted(why)) + "}");
  busy_[open.pid] = false;
}

void TimelineTrace::end_all(int64_t time_us, const std::string& why) {
  for (auto& [operation, open] : open_) end(open, time_us, why);
  open_.clear();
}

void TimelineTrace::gap(uint64_t events, int64_t time_us) {
  dropped_ += events;
  end_all(std::max(time_us, last_us_), "unknown: the timeline could not keep up, events are missing here");
  operation_of_.clear();
  arrivals_.clear();
}

void TimelineTrace::finish(int64_t time_us) {
  time_us = std::max(time_us, last_us_);
  end_all(time_us, "not over when the timeline was stopped");
  if (dropped_ > 0) {
    write(0, 'i', "EVENTS_DROPPED", time_us, R"(,"s":"g","args":{"count":)" + std::to_string(dropped_) + "}");
  }
}

void TimelineTrace::tick(const Open& open, int rank, int64_t time_us) {
  write(open.pid, 'X', std::to_string(rank), time_us, R"(,"dur":0)");
}

// Takes a process of the trace that is idle, or makes a new one.
int TimelineTrace::process_for(const std::string& name) {
  std::vector<int>& known = processes_[name];
  const auto idle = std::find_if(known.begin(), known.end(), [&](int pid) { return !busy_[pid]; });
  if (idle != known.end()) {
    busy_[*idle] = true;
    return *idle;
  }
  const int pid = static_cast<int>(busy_.size());
  busy_.push_back(true);
  last_.push_back({});
  known.push_back(pid);
  const std::string shown = known.size() == 1 ? name : name + " (" + std::to_string(known.size()) + ")";
  text_ += ",\n{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":" + std::to_string(pid) +
           ",\"args\":{\"name\":" + quoted(shown) +
           "}},\n{\"name\":\"process_sort_index\",\"ph\":\"M\",\"pid\":" + std::to_string(pid) +
           ",\"args\":{\"sort_index\":" + std::to_string(pid) + "}}";
  return pid;
}

// Perfetto sorts by time, and where an end is not later than its beginning, or a tick than another, spans stay open. A
// clock of microseconds makes such moments, so those are told apart by nanoseconds.
int64_t TimelineTrace::moment_ns(int pid, char phase, int64_t time_us) {
  int64_t ns = std::max<int64_t>(0, time_us - start_us_) * 1000;
  if (pid == 0) return ns;
  Last& last = last_[pid];
  const bool later = phase == 'E' ? last.phase != 'E' : phase == 'X' && last.phase == 'X';
  ns = std::max(ns, last.ns + (later ? 1 : 0));
  last = {ns, phase};
  return ns;
}

void TimelineTrace::write(int pid, char phase, const std::string& name, int64_t time_us, const std::string& more) {
  const int64_t ns = moment_ns(pid, phase, time_us);
  std::string fraction;
  if (ns % 1000) {
    fraction = std::to_string(1000 + ns % 1000);
    fraction[0] = '.';
  }
  text_ += std::string(",\n{\"ph\":\"") + phase + "\",\"name\":" + quoted(name) +
           ",\"ts\":" + std::to_string(ns / 1000) + fraction + ",\"pid\":" + std::to_string(pid) + more + "}";
}

TimelineTrace::Open* TimelineTrace::find(uint64_t operation) {
  const auto found = open_.find(operation);
  return found == open_.end() ? nullptr : &found->second;
}

TimelineTrace::Open* TimelineTrace::find(const Key& key) {
  const auto found = operation_of_.find(key);
  Open* open = found == operation_of_.end() ? nullptr : find(found->second);
  return open && open->key == key ? open : nullptr;
}

}  // namespace horovod
