#include "engine/mesh_order_log.h"

#include <algorithm>

#include "base/clock.h"
#include "collectives/mesh/eager.h"

namespace horovod {
namespace {

// A member that has left is no reason to stop before everything agreed has come, and only the sequencer knows when that
// is. It closes the log when it drives; when it does not for this long, nothing is on its way either.
constexpr int64_t kCloseGraceUs = 1'000'000;
// More small data than this is better off in an ordinary exchange.
constexpr size_t kEagerFrameBytes = 64u << 10;

Status bad_frame(const ControlFrame& frame, const std::string& what) {
  return {Code::aborted, "Rank " + std::to_string(frame.peer) + " of the mesh sent " + what +
                             " in a frame of the order log; this epoch can't go on."};
}

Status bad_id(TensorId id) {
  return {Code::invalid_argument,
          "Id " + std::to_string(id) + " is outside of the order log's 0 to " + std::to_string(kMaxIds - 1) + "."};
}

}  // namespace

MeshOrderLog::MeshOrderLog(Mesh& mesh, FuseRule fuse, AbortSignal& abort, const Hosts* hosts)
    : mesh_(mesh), fuse_(std::move(fuse)), abort_(abort), hosts_(hosts), own_(kMaxIds) {
  if (sequences()) counts_.resize(kMaxIds);
}

// -- any thread -------------------------------------------------------------------------------------------------------

Status MeshOrderLog::arrive(TensorId id, Operation* operation) {
  if (id >= kMaxIds) return bad_id(id);
  bool wake = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    Own& own = own_[id];
    own.operation = operation;
    bool eager = operation && !own.plain && mesh::is_eager(operation->spec, mesh_.size());
    if (sequences()) {
      if (eager) mesh::pack_eager(*operation, 0, own.bytes);
      const size_t agreed = agreed_.size();
      if (!count(0, id, !eager)) {
        return {Code::internal, "This rank has arrived twice at id " + std::to_string(id) + " of the order log."};
      }
      wake = waiting_ && agreed_.size() > agreed;
    } else {
      gather(ControlKind::ready, id);
      std::string& bytes = gathered_.back().bytes;
      eager = eager && bytes.size() < kEagerFrameBytes;
      if (eager) {
        mesh::pack_eager(*operation, mesh_.rank(), own.bytes);
        mesh::append_contribution(bytes, id, own.generation, own.bytes);
      }
      wake = waiting_;
    }
  }
  if (wake) mesh_.wake();
  return {};
}

Status MeshOrderLog::withdraw(TensorId id) {
  if (id >= kMaxIds) return bad_id(id);
  bool wake = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (sequences()) {
      if (take_back(0, id)) taken_back_.push_back(id);
    } else if (closed_) {
      taken_back_.push_back(id);  // it can't be agreed any more
    } else {
      gather(ControlKind::withdraw, id);
    }
    wake = waiting_;
  }
  if (wake) mesh_.wake();
  return {};
}

void MeshOrderLog::gather(ControlKind kind, TensorId id) {
  if (gathered_.empty() || gathered_.back().kind != kind || gathered_.back().ids.size() == kMaxIds) {
    gathered_.push_back({kind, {}, {}});
  }
  gathered_.back().ids.push_back(id);
}

bool MeshOrderLog::count(int member, TensorId id, bool plain) {
  Count& count = counts_[id];
  if (count.members.empty()) count.members.resize(mesh_.size());
  if (count.members[member]) return false;
  count.members[member] = true;
  count.plain = count.plain || plain;
  if (watch_) watch_(member, id, Arrival::counted);
  if (++count.arrived < static_cast<uint32_t>(mesh_.size()) || closed_) return true;
  if (watch_) watch_(member, id, Arrival::last);
  agreed_.push_back({id, count.plain});
  count.arrived = 0;
  std::fill(count.members.begin(), count.members.end(), false);
  count.plain = false;
  return true;
}

bool MeshOrderLog::take_back(int member, TensorId id) {
  Count& count = counts_[id];
  if (count.members.empty() || !count.members[member]) return false;
  count.members[member] = false;
  if (watch_) watch_(member, id, Arrival::taken_back);
  count.plain = true;  // bytes that came with the arrival are on their way to everybody and count no more
  --count.arrived;
  return true;
}

// -- the driver -------------------------------------------------------------------------------------------------------

Status MeshOrderLog::poll(LogEvent& event) {
  event.kind = LogEvent::none;
  event.ids.clear();
  event.completed = false;
  if (abort_.raised()) return abort_.cause();
  HVD_TRY(send_gathered());
  bool reported = false;
  HVD_TRY(report(event, reported));
  if (reported) return {};
  HVD_TRY(receive());
  HVD_TRY(decide());
  return report(event, reported);
}

Status MeshOrderLog::wait(int64_t timeout_us) {
  if (abort_.raised()) return abort_.cause();
  HVD_TRY(send_gathered());
  if (!entries_.empty() && complete(entries_.front())) return {};
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!taken_back_.empty() || !agreed_.empty() || !gathered_.empty()) return {};
    if (closed_ && entries_.empty()) return {Code::left, why_closed_};
    waiting_ = true;  // from here on arrive() and withdraw() wake us
  }
  if (!departed_.empty()) {
    timeout_us = std::min(timeout_us, std::max<int64_t>(0, departed_since_us_ + kCloseGraceUs - now_us()));
  }
  Status status = mesh_.wait(timeout_us);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    waiting_ = false;
  }
  HVD_TRY(std::move(status));
  if (!departed_.empty() && now_us() - departed_since_us_ >= kCloseGraceUs) {
    HVD_TRY(receive());  // the last look
    if (entries_.empty()) close(departed_);
  }
  return {};
}

Status MeshOrderLog::send_gathered() {
  if (sequences()) return {};
  for (;;) {
    Gathered frame;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (gathered_.empty()) return {};
      frame = std::move(gathered_.front());
      gathered_.pop_front();
    }
    HVD_TRY(mesh_.send_control(0, frame.kind, frame.ids, frame.bytes));
    if (frame.bytes.empty()) continue;
    for (int member = 1; member < mesh_.size(); ++member) {
      if (member != mesh_.rank()) HVD_TRY(mesh_.send_control(member, ControlKind::eager, {}, frame.bytes));
    }
  }
}

Status MeshOrderLog::receive() {
  ControlFrame frame;
  for (bool found = true;;) {
    HVD_TRY(mesh_.next_control(frame, found));
    if (!found) return {};
    HVD_TRY(handle(frame));
  }
}

Status MeshOrderLog::handle(ControlFrame& frame) {
  for (const TensorId id : frame.ids) {
    if (id >= kMaxIds) return bad_frame(frame, "id " + std::to_string(id));
  }
  if (frame.kind == ControlKind::abort) return {Code::aborted, frame.text};
  return sequences() ? handle_as_sequencer(frame) : handle_as_member(frame);
}

Status MeshOrderLog::handle_as_sequencer(ControlFrame& frame) {
  if (frame.kind == ControlKind::leave) {
    if (!close(frame.text)) return {};
    for (int member = 1; member < mesh_.size(); ++member) {
      if (member != frame.peer) HVD_TRY(mesh_.send_control(member, ControlKind::batch, {}, frame.text));
    }
    return {};
  }
  if (frame.kind != ControlKind::ready && frame.kind != ControlKind::withdraw) {
    return bad_frame(frame, "what only rank 0 may send");
  }
  std::vector<TensorId> eager, withdrawn;
  HVD_TRY(store_.take(frame.peer, frame.text, &eager));
  size_t next_eager = 0;  // they come in the order of the ids
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const TensorId id : frame.ids) {
      if (frame.kind == ControlKind::withdraw) {
        if (take_back(frame.peer, id)) withdrawn.push_back(id);
        continue;
      }
      const bool brings = next_eager < eager.size() && eager[next_eager] == id;
      next_eager += brings ? 1 : 0;
      if (!count(frame.peer, id, !brings)) return bad_frame(frame, "id " + std::to_string(id) + " twice");
    }
  }
  if (next_eager != eager.size()) return bad_frame(frame, "small data that belongs to no arrival");
  if (withdrawn.empty()) return {};
  return mesh_.send_control(frame.peer, ControlKind::withdrawn, withdrawn);
}

Status MeshOrderLog::handle_as_member(ControlFrame& frame) {
  if (frame.kind == ControlKind::leave) {
    if (frame.peer == 0) {
      close(std::move(frame.text));
    } else if (departed_.empty()) {
      departed_ = frame.text;
      departed_since_us_ = now_us();
    }
    return {};
  }
  if (frame.kind == ControlKind::eager) return store_.take(frame.peer, frame.text, nullptr);
  if (frame.peer != 0 || (frame.kind != ControlKind::batch && frame.kind != ControlKind::withdrawn)) {
    return bad_frame(frame, "what only goes to rank 0 or comes from it");
  }
  if (frame.kind == ControlKind::withdrawn) {
    for (const TensorId id : frame.ids) entries_.push_back({{LogEvent::withdrawn, {id}}});
  } else if (frame.ids.empty()) {
    close(std::move(frame.text));
  } else {
    HVD_TRY(store_.take(0, frame.text, nullptr));
    entries_.push_back({{LogEvent::batch, std::move(frame.ids)}, !frame.text.empty()});
  }
  return {};
}

// Lists what was taken back here; the sequencer cuts what is agreed into batches and tells everybody.
Status MeshOrderLog::decide() {
  std::vector<Agreed> agreed;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    agreed.swap(agreed_);
    for (const TensorId id : taken_back_) entries_.push_back({{LogEvent::withdrawn, {id}}});
    taken_back_.clear();
    if (closed_) agreed.clear();  // in nobody's batch yet, and it would need the member that has just gone
  }
  // Eager ones first, so that they do not come between others that can be fused.
  std::stable_partition(agreed.begin(), agreed.end(), [](const Agreed& entry) { return !entry.plain; });
  std::vector<TensorId> ids;
  for (size_t begin = 0; begin < agreed.size();) {
    const bool plain = agreed[begin].plain;
    ids.clear();
    for (size_t i = begin; i < agreed.size() && agreed[i].plain == plain; ++i) ids.push_back(agreed[i].id);
    std::string bytes;  // of this member, for an eager batch
    if (plain) {
      ids.resize(std::clamp<size_t>(fuse_(ids.data(), ids.size()), 1, ids.size()));
    } else {
      const std::lock_guard<std::mutex> lock(mutex_);
      size_t size = 0;
      for (; size < ids.size() && bytes.size() < kEagerFrameBytes; ++size) {
        mesh::append_contribution(bytes, ids[size], own_[ids[size]].generation, own_[ids[size]].bytes);
      }
      ids.resize(size);
    }
    for (int member = 1; member < mesh_.size(); ++member) {
      HVD_TRY(mesh_.send_control(member, ControlKind::batch, ids, bytes));
    }
    entries_.push_back({{LogEvent::batch, ids}, !plain});
    begin += ids.size();
  }
  return {};
}

// Is everything there that poll() needs to report this entry?
bool MeshOrderLog::complete(const Entry& entry) {
  if (!entry.eager) return true;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const TensorId id : entry.event.ids) {
    const Own& own = own_[id];
    for (int member = 0; member < mesh_.size() && own.operation; ++member) {
      if (member == mesh_.rank() || !mesh::contributes(own.operation->spec, member)) continue;
      if (!store_.find(id, member, own.generation)) return false;
    }
  }
  return true;
}

// Computes the results of a complete eager batch.
Status MeshOrderLog::run(const Entry& entry) {
  std::vector<const std::string*> contributions(mesh_.size());
  for (const TensorId id : entry.event.ids) {
    std::string own_bytes;
    Operation* operation = nullptr;
    uint32_t generation = 0;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      own_bytes.swap(own_[id].bytes);
      operation = own_[id].operation;
      generation = own_[id].generation;
    }
    if (!operation) {
      return {Code::internal,
              "The order log ran id " + std::to_string(id) + " with data that this rank did not bring."};
    }
    for (int member = 0; member < mesh_.size(); ++member) {
      contributions[member] = member == mesh_.rank() ? &own_bytes : store_.find(id, member, generation);
    }
    HVD_TRY(mesh::run_eager(*operation, contributions, hosts_));
  }
  return {};
}

Status MeshOrderLog::report(LogEvent& event, bool& reported) {
  if (entries_.empty() || !complete(entries_.front())) return {};
  Entry entry = std::move(entries_.front());
  entries_.pop_front();
  if (entry.eager) {
    HVD_TRY(run(entry));
    entry.event.completed = true;
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const TensorId id : entry.event.ids) {
      Own& own = own_[id];
      own.operation = nullptr;
      own.bytes.clear();
      own.plain = entry.event.kind == LogEvent::withdrawn;
      if (own.plain) continue;
      store_.drop(id, own.generation);
      ++own.generation;
    }
  }
  event = std::move(entry.event);
  reported = true;
  return {};
}

// From now on nothing more is agreed. False: it is closed already.
bool MeshOrderLog::close(std::string sentence) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (closed_) return false;
  closed_ = true;
  why_closed_ = std::move(sentence);
  return true;
}

}  // namespace horovod
