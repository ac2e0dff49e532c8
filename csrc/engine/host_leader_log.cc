#include "engine/host_leader_log.h"

#include <algorithm>

#include "base/clock.h"
#include "base/limits.h"
#include "collectives/mesh/eager.h"

namespace horovod {
namespace {

std::vector<const std::atomic<uint64_t>*> cursors(Region& region) {
  std::vector<const std::atomic<uint64_t>*> found;
  for (int place = 1; place < region.size(); ++place) {
    found.push_back(&reinterpret_cast<HostMemory*>(region.log(place))->heard.value);
  }
  return found;
}

}  // namespace

HostLeaderLog::HostLeaderLog(Mesh& mesh, Region& region, const Hosts& hosts, FuseRule fuse, AbortSignal& abort)
    : mesh_(mesh),
      region_(region),
      hosts_(hosts),
      host_(hosts.host(mesh.rank())),
      abort_(abort),
      memory_(*reinterpret_cast<HostMemory*>(region.log(0))),
      between_(MeshOrderLog::make(mesh, std::move(fuse), abort, &hosts)),
      counts_(kMaxIds),
      to_members_(memory_, cursors(region)) {
  for (int place = 1; place < region.size(); ++place) {
    HostMemory& theirs = *reinterpret_cast<HostMemory*>(region.log(place));
    members_.emplace_back(theirs, theirs.taken.value, region.label(place));
  }
  mesh.set_poll_source(this);
}

void HostLeaderLog::watch(MeshOrderLog::Watch watch) {
  if (mesh_.rank() != 0) return;
  watch_ = std::move(watch);
  between_->watch([this](int host, TensorId id, Arrival what) {
    if (what == Arrival::last) {
      watch_(hosts_.leader(host), id, what);
    } else if (host != host_) {
      for (const int member : hosts_.members(host)) watch_(member, id, what);
    }
  });
}

// -- any thread -------------------------------------------------------------------------------------------------------

Status HostLeaderLog::arrive(TensorId id, Operation* operation) {
  if (id >= kMaxIds) return bad_id(id);
  const std::lock_guard<std::mutex> lock(mutex_);
  counts_[id].operation = operation;
  if (!operation || !mesh::is_eager(operation->spec, hosts_.count())) return count(0, id, nullptr);
  const std::string bytes = mesh::pack_eager(*operation, mesh_.rank());
  const std::string_view brought = bytes;
  return count(0, id, &brought);
}

Status HostLeaderLog::withdraw(TensorId id) {
  if (id >= kMaxIds) return bad_id(id);
  bool taken_out = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    HVD_TRY(withdraw_of(0, id, taken_out));
    if (taken_out) withdrawn_.push_back(id);
  }
  if (taken_out) wake();
  return {};
}

Status HostLeaderLog::count(size_t place, TensorId id, const std::string_view* bytes) {
  Count& count = counts_[id];
  const auto size = static_cast<size_t>(region_.size());
  if (count.here.empty()) {
    count.here.resize(size);
    count.brought.resize(size);
    count.withdrawing.resize(size);
    count.bytes.resize(size);
  }
  if (count.here[place]) {
    return {Code::internal, error_code::internal,
            capitalized(region_.label(static_cast<int>(place))) + " has arrived twice at id " + std::to_string(id) +
                " of the order log; please report this."};
  }
  count.here[place] = true;
  count.brought[place] = bytes != nullptr;
  count.plain += bytes ? 0 : 1;
  if (bytes) count.bytes[place] = *bytes;
  if (watch_) watch_(hosts_.members(host_)[place], id, Arrival::counted);
  if (++count.arrived < size) return {};
  count.forwarded = true;
  if (count.plain > 0) return between_->arrive(id);
  std::string combined;
  HVD_TRY(mesh::combine_host(*count.operation, hosts_, host_, count.bytes, combined));
  return between_->arrive_combined(id, *count.operation, std::move(combined));
}

void HostLeaderLog::take_out(size_t place, TensorId id) {
  Count& count = counts_[id];
  count.here[place] = count.withdrawing[place] = false;
  count.bytes[place] = {};
  if (place == 0) count.operation = nullptr;
  --count.arrived;
  count.plain -= count.brought[place] ? 0 : 1;
  if (watch_) watch_(hosts_.members(host_)[place], id, Arrival::withdrawn);
}

// A rank withdraws its arrival. taken_out: whether it is withdrawn at once; if not, its batch or the answer of the log
// between hosts will come.
Status HostLeaderLog::withdraw_of(size_t place, TensorId id, bool& taken_out) {
  Count& count = counts_[id];
  if (count.here.empty() || !count.here[place]) return {};
  taken_out = !count.forwarded;
  if (taken_out) {
    take_out(place, id);
    return {};
  }
  const bool first = std::find(count.withdrawing.begin(), count.withdrawing.end(), true) == count.withdrawing.end();
  count.withdrawing[place] = true;
  return first ? between_->withdraw(id) : Status();
}

// -- the driver -------------------------------------------------------------------------------------------------------

Status HostLeaderLog::poll(LogEvent& event) {
  event.kind = LogEvent::none;
  event.ids.clear();
  event.completed = false;
  if (abort_.raised()) return abort_.cause();
  HVD_TRY(read_members());
  if (!to_members_.flush()) return {};
  if (held_) {
    event = std::move(*held_);
    held_.reset();
    return {};
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!withdrawn_.empty()) {
      event.kind = LogEvent::withdrawn;
      event.ids.push_back(withdrawn_.back());
      withdrawn_.pop_back();
      return {};
    }
  }
  for (;;) {
    HVD_TRY(between_->poll(event));
    if (event.kind == LogEvent::withdrawn && !host_withdrawn(event.ids[0])) continue;
    break;
  }
  if (event.kind == LogEvent::batch) {
    publish(event);
    if (to_members_.starving()) {
      held_ = std::move(event);
      event = {};
    }
  }
  return {};
}

Status HostLeaderLog::read_members() {
  HostMessage message;
  std::string_view payload;
  for (size_t i = 0; i < members_.size(); ++i) {
    bool room = false;  // this member has waited for room in its ring, and has it now
    for (;;) {
      bool found = false;
      HVD_TRY(members_[i].peek(message, payload, found));
      if (!found) break;
      HVD_TRY(take(message, i + 1, payload));
      room = members_[i].consume() || room;
    }
    if (room) region_.ring_sleepers();
  }
  return {};
}

Status HostLeaderLog::take(const HostMessage& message, size_t place, std::string_view payload) {
  const auto bad = [&](const std::string& what) {
    return Status(
        Code::aborted, error_code::unexpected_data,
        capitalized(region_.label(static_cast<int>(place))) + " told this rank " + what + "; this world ends.");
  };
  if (message.id >= kMaxIds) return bad("of id " + std::to_string(message.id) + ", which does not exist");
  if (message.kind == HostMessage::withdraw) {
    bool taken_out = false;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      HVD_TRY(withdraw_of(place, message.id, taken_out));
    }
    if (taken_out) answer(place, message.id);
    return {};
  }
  if (message.kind != HostMessage::plain && message.kind != HostMessage::brings) {
    return bad("what only the first rank of a host may say");
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  return count(place, message.id, message.kind == HostMessage::brings ? &payload : nullptr);
}

void HostLeaderLog::answer(size_t place, TensorId id) {
  to_members_.send({HostMessage::withdrawn, id, static_cast<uint32_t>(place), 0}, [](std::byte*) {});
  region_.ring_sleepers();
}

// Passes a batch on. All ranks of the host have arrived at its ids, and may arrive again as soon as they read it.
void HostLeaderLog::publish(const LogEvent& event) {
  std::vector<const Operation*> operations;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const TensorId id : event.ids) {
      Count& count = counts_[id];
      operations.push_back(count.operation);
      count.operation = nullptr;
      count.arrived = count.plain = 0;
      count.forwarded = false;
      std::fill(count.here.begin(), count.here.end(), false);
      std::fill(count.withdrawing.begin(), count.withdrawing.end(), false);
      for (std::string& bytes : count.bytes) bytes = {};
    }
  }
  if (event.completed) {
    for (size_t i = 0; i < event.ids.size(); ++i) {
      const auto bytes = static_cast<uint32_t>(mesh::result_bytes(*operations[i]));
      to_members_.send({HostMessage::done, event.ids[i], 0, bytes},
                       [&](std::byte* to) { mesh::pack_result(*operations[i], to); });
    }
  } else {
    const size_t bytes = event.ids.size() * sizeof(TensorId);
    to_members_.send({HostMessage::batch, 0, 0, static_cast<uint32_t>(bytes)},
                     [&](std::byte* to) { std::memcpy(to, event.ids.data(), bytes); });
  }
  region_.ring_sleepers();
}

// The host's arrival was withdrawn, so the ranks that asked to withdraw theirs are answered. True: this rank is one of
// them.
bool HostLeaderLog::host_withdrawn(TensorId id) {
  std::vector<size_t> others;
  bool mine = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    Count& count = counts_[id];
    count.forwarded = false;
    for (size_t place = 0; place < count.withdrawing.size(); ++place) {
      if (!count.withdrawing[place]) continue;
      take_out(place, id);
      mine = mine || place == 0;
      if (place > 0) others.push_back(place);
    }
  }
  for (const size_t place : others) answer(place, id);
  return mine;
}

bool HostLeaderLog::news() {
  return std::any_of(members_.begin(), members_.end(), [](const HostReader& member) { return member.news(); });
}

Status HostLeaderLog::wait(int64_t until_us) {
  until_us = std::min(until_us, now_us() + limits::kPeerCheckUs);
  if (held_ || to_members_.starving()) {  // a member reads slowly, and wakes this one when it has made room
    bool busy = false;
    HVD_TRY(mesh_.progress(busy));  // that member may be slow because another host waits for bytes of this rank
    if (busy) until_us = std::min(until_us, now_us() + limits::kNetworkTurnUs);
    region_.sleep_until([&] { return memory_.starved.value.load() == 0 || abort_.raised(); }, until_us);
    return look_at_members();
  }
  if (news()) return {};
  Status status = between_->wait(until_us);
  if (status.ok()) return look_at_members();
  if (status.code() == Code::left && !closing_told_) {
    closing_told_ = true;
    const std::string& why = status.message();
    to_members_.send({HostMessage::closed, 0, 0, static_cast<uint32_t>(why.size())},
                     [&](std::byte* to) { std::memcpy(to, why.data(), why.size()); });
    region_.ring_sleepers();
  }
  return status;
}

// A lost member ends the epoch. A member that has left has written its last message before; then the log closes.
Status HostLeaderLog::look_at_members() {
  if (departure_told_) return {};
  const int64_t now = now_us();
  if (now - looked_us_ < limits::kPeerCheckUs && !between_->anyone_departed()) return {};
  looked_us_ = now;
  HVD_TRY(region_.check_members());
  if (region_.departed() < 0) return {};
  departure_told_ = true;
  HVD_TRY(read_members());
  return between_->depart(region_.departure_sentence(region_.departed()));
}

}  // namespace horovod
