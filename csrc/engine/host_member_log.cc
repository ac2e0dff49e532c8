#include "engine/host_member_log.h"

#include <algorithm>

#include "base/clock.h"
#include "base/limits.h"
#include "collectives/mesh/eager.h"

namespace horovod {

HostMemberLog::HostMemberLog(Mesh& mesh, Region& region, const Hosts& hosts, AbortSignal& abort)
    : mesh_(mesh),
      region_(region),
      hosts_(hosts),
      abort_(abort),
      memory_(*reinterpret_cast<HostMemory*>(region.log(region.rank()))),
      leaders_(*reinterpret_cast<HostMemory*>(region.log(0))),
      from_leader_(leaders_, memory_.heard.value, region.label(0)),
      to_leader_(memory_, {&memory_.taken.value}),
      own_(kMaxIds) {}

Status HostMemberLog::arrive(TensorId id, Operation* operation) {
  if (id >= kMaxIds) return bad_id(id);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    own_[id] = {operation, true, false};
    const auto place = static_cast<uint32_t>(region_.rank());
    if (operation && mesh::is_eager(operation->spec, hosts_.count())) {
      const auto bytes = static_cast<uint32_t>(mesh::eager_bytes(*operation, mesh_.rank()));
      to_leader_.send({HostMessage::brings, id, place, bytes},
                      [&](std::byte* to) { mesh::pack_eager(*operation, mesh_.rank(), to); });
    } else {
      to_leader_.send({HostMessage::plain, id, place, 0}, [](std::byte*) {});
    }
    starving_.store(to_leader_.starving(), std::memory_order_relaxed);
  }
  return tell_leader();
}

Status HostMemberLog::withdraw(TensorId id) {
  if (id >= kMaxIds) return bad_id(id);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) {
      if (own_[id].arrived) withdrawn_.push_back(id);
    } else {
      to_leader_.send({HostMessage::withdraw, id, static_cast<uint32_t>(region_.rank()), 0}, [](std::byte*) {});
      starving_.store(to_leader_.starving(), std::memory_order_relaxed);
    }
  }
  wake();
  return tell_leader();
}

// To be called after a message was written. A leader that sleeps has set its flag before its last look for messages.
Status HostMemberLog::tell_leader() {
  if (leaders_.asleep.value.load() == 0 || leaders_.asleep.value.exchange(0) == 0) return {};
  return mesh_.send_control(hosts_.leader(hosts_.host(mesh_.rank())), ControlKind::nudge, {});
}

// Ends the arrival at `id` and frees what belongs to it; false when there is no arrival.
bool HostMemberLog::forget(TensorId id, Operation*& operation) {
  if (id >= kMaxIds) return false;
  const std::lock_guard<std::mutex> lock(mutex_);
  operation = std::exchange(own_[id].operation, nullptr);
  return std::exchange(own_[id].arrived, false);
}

bool HostMemberLog::is_withdrawn(TensorId id) {
  if (id >= kMaxIds) return false;
  const std::lock_guard<std::mutex> lock(mutex_);
  return own_[id].withdrawn;
}

Status HostMemberLog::poll(LogEvent& event) {
  event.kind = LogEvent::none;
  event.ids.clear();
  event.completed = false;
  if (abort_.raised()) return abort_.cause();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (to_leader_.starving()) starving_.store(!to_leader_.flush(), std::memory_order_relaxed);
    if (!withdrawn_.empty()) {
      event.kind = LogEvent::withdrawn;
      event.ids.push_back(withdrawn_.back());
      withdrawn_.pop_back();
      own_[event.ids[0]] = {nullptr, false, true};
      return {};
    }
  }
  HostMessage message;
  std::string_view payload;
  for (bool found = true;;) {
    HVD_TRY(from_leader_.peek(message, payload, found));
    // Results that come together are one batch; every other message is an event of its own.
    if (!found || (event.kind != LogEvent::none && message.kind != HostMessage::done)) return {};
    Status status = take(message, payload, event);
    if (from_leader_.consume()) {
      region_.ring_sleepers();
      HVD_TRY(tell_leader());
    }
    HVD_TRY(std::move(status));
    if (event.kind != LogEvent::none && !event.completed) return {};
  }
}

Status HostMemberLog::take(const HostMessage& message, std::string_view payload, LogEvent& event) {
  const auto bad = [&](const char* what) {
    return Status(Code::aborted, error_code::unexpected_data,
                  capitalized(region_.label(0)) + " told this rank of " + what + "; this world ends.");
  };
  Operation* operation = nullptr;
  switch (message.kind) {
    case HostMessage::done: {
      if (!forget(message.id, operation) || !operation) {
        return is_withdrawn(message.id) ? Status() : bad("the result of what this rank has not brought");
      }
      HVD_TRY(mesh::take_result(*operation, payload));
      event.kind = LogEvent::batch;
      event.completed = true;
      event.ids.push_back(message.id);
      return {};
    }
    case HostMessage::batch:
      if (payload.empty() || payload.size() % sizeof(TensorId) > 0) return bad("a batch without whole ids");
      event.kind = LogEvent::batch;
      event.ids.resize(payload.size() / sizeof(TensorId));
      std::memcpy(event.ids.data(), payload.data(), payload.size());
      for (const TensorId id : event.ids) {
        if (forget(id, operation)) continue;
        return is_withdrawn(id) ? Status(Code::left, why_closed_)
                                : bad("a batch with what this rank has not arrived at");
      }
      return {};
    case HostMessage::withdrawn:
      if (message.member != static_cast<uint32_t>(region_.rank())) return {};
      if (!forget(message.id, operation)) {
        return is_withdrawn(message.id) ? Status() : bad("the withdrawal of what this rank has not arrived at");
      }
      event.kind = LogEvent::withdrawn;
      event.ids.push_back(message.id);
      return {};
    case HostMessage::closed: {
      if (payload.empty()) return bad("the end of the order log without a reason");
      const std::lock_guard<std::mutex> lock(mutex_);
      closed_ = true;
      why_closed_ = payload;
      return {};
    }
    default:
      return bad("what only goes to the first rank of a host");
  }
}

Status HostMemberLog::wait(int64_t until_us) {
  if (!why_closed_.empty()) return {Code::left, why_closed_};
  const auto ready = [&] {
    return from_leader_.news() || woken_.load(std::memory_order_acquire) || abort_.raised() || region_.has_ended(0) ||
           (starving_.load(std::memory_order_relaxed) && memory_.starved.value.load(std::memory_order_relaxed) == 0);
  };
  bool poll = true;
  do {
    const bool is_ready = region_.sleep_until(ready, until_us, std::exchange(poll, false));
    if (is_ready && !region_.has_ended(0)) break;
    HVD_TRY(region_.check_members());
    if (from_leader_.news()) break;  // what was agreed before a rank left comes first
    if (region_.has_ended(0)) return {Code::left, region_.departure_sentence(0)};
    HVD_TRY(look_around());
    // As in MeshOrderLog: a leader that drives closes the log much sooner.
    if (!departed_.empty() && now_us() - departed_since_us_ >= limits::kDepartureGraceUs) {
      const std::lock_guard<std::mutex> lock(mutex_);
      closed_ = true;
      why_closed_ = departed_;
      break;
    }
  } while (now_us() < until_us);
  (void)woken_.exchange(false, std::memory_order_acq_rel);  // what others wrote before wake() is visible from here on
  return abort_.raised() ? abort_.cause() : Status();
}

// Notices members of any host that have left or are lost.
Status HostMemberLog::look_around() {
  bool busy = false;
  HVD_TRY(mesh_.progress(busy));
  ControlFrame frame;
  for (bool found = true;;) {
    HVD_TRY(mesh_.next_control(frame, found));
    if (!found) break;
    if (frame.kind == ControlKind::abort) return {Code::aborted, frame.text};
    if (frame.kind == ControlKind::leave && departed_.empty()) {
      departed_ = frame.text;
      departed_since_us_ = now_us();
    }
  }
  return {};
}

void HostMemberLog::wake() {
  woken_.store(true, std::memory_order_release);
  region_.ring_self();
}

}  // namespace horovod
