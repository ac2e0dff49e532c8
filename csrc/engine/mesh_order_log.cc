#include "engine/mesh_order_log.h"

#include <algorithm>

#include "base/clock.h"
#include "collectives/mesh/eager.h"
#include "collectives/mesh/eager_records.h"

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
    own.arrived = true;
    own.brought = own.revoked = false;
    const bool eager = operation && mesh::is_eager(operation->spec, mesh_.size());
    std::string bytes = eager ? mesh::pack_eager(*operation, mesh_.rank()) : std::string();
    if (!sequences() || (eager && pair())) {
      Gathered& frame = gather(sequences() ? ControlKind::offer : ControlKind::ready, id);
      own.brought = eager && frame.bytes.size() < kEagerFrameBytes;
      if (own.brought) mesh::append_record(frame.bytes, id, bytes);
      wake = waiting_;
    }
    if (sequences()) {
      const size_t agreed = agreed_.size();
      const std::string_view brought = bytes;
      if (!count(0, id, own.brought || (eager && !pair()) ? &brought : nullptr)) {
        return {Code::internal, "This rank has arrived twice at id " + std::to_string(id) + " of the order log."};
      }
      wake = wake || (waiting_ && agreed_.size() > agreed);
    } else if (pair()) {
      own.bytes = std::move(bytes);
      match(id);
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
    if (closed_ && !sequences()) {  // it can't be agreed any more
      const bool agreed = std::any_of(agreed_.begin(), agreed_.end(), [id](const Agreed& a) { return a.id == id; });
      if (!agreed) taken_back_.push_back(id);
    } else if (!sequences()) {
      gather(ControlKind::withdraw, id);
    } else if (own_[id].brought && !closed_) {  // the other of two members may have used it
      if (counts_[id].members[0]) gather(ControlKind::withdraw, id);
    } else if (take_back(0, id)) {
      taken_back_.push_back(id);
    }
    wake = waiting_;
  }
  if (wake) mesh_.wake();
  return {};
}

MeshOrderLog::Gathered& MeshOrderLog::gather(ControlKind kind, TensorId id) {
  if (gathered_.empty() || gathered_.back().kind != kind || gathered_.back().ids.size() == kMaxIds) {
    gathered_.push_back({kind, {}, {}});
  }
  gathered_.back().ids.push_back(id);
  return gathered_.back();
}

bool MeshOrderLog::count(int member, TensorId id, const std::string_view* bytes) {
  Count& count = counts_[id];
  if (count.members.empty()) {
    count.members.resize(mesh_.size());
    count.brought.resize(mesh_.size());
    count.bytes.resize(mesh_.size());
  }
  if (count.members[member]) return false;
  count.members[member] = true;
  count.brought[member] = bytes != nullptr;
  count.plain += bytes ? 0 : 1;
  if (bytes) count.bytes[member] = *bytes;
  if (watch_) watch_(member, id, Arrival::counted);
  if (++count.arrived < static_cast<uint32_t>(mesh_.size()) || (closed_ && !pair())) return true;
  if (watch_) watch_(member, id, Arrival::last);
  agreed_.push_back({id, count.plain > 0, {}});
  if (count.plain == 0) {
    agreed_.back().bytes.resize(mesh_.size());
    agreed_.back().bytes.swap(count.bytes);
  }
  count.arrived = 0;
  count.plain = 0;
  std::fill(count.members.begin(), count.members.end(), false);
  return true;
}

bool MeshOrderLog::take_back(int member, TensorId id) {
  Count& count = counts_[id];
  if (count.members.empty() || !count.members[member]) return false;
  count.members[member] = false;
  if (watch_) watch_(member, id, Arrival::taken_back);
  --count.arrived;
  count.plain -= count.brought[member] ? 0 : 1;
  return true;
}

// The other of two members: has this one arrived, with its bytes, at something that was offered?
void MeshOrderLog::match(TensorId id) {
  Own& own = own_[id];
  if (!own.brought || !own.offered) return;
  agreed_.push_back({id, false, {}});
  agreed_.back().bytes.push_back(std::move(own.offer));
  agreed_.back().bytes.push_back(std::move(own.bytes));
  own.brought = own.offered = false;
}

// -- the driver -------------------------------------------------------------------------------------------------------

Status MeshOrderLog::poll(LogEvent& event) {
  event.kind = LogEvent::none;
  event.ids.clear();
  event.completed = false;
  if (abort_.raised()) return abort_.cause();
  HVD_TRY(send_gathered());
  if (report(event)) return {};
  HVD_TRY(receive());
  HVD_TRY(decide());
  report(event);
  return {};
}

Status MeshOrderLog::wait(int64_t timeout_us) {
  if (abort_.raised()) return abort_.cause();
  HVD_TRY(send_gathered());
  if (!entries_.empty()) return {};
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!taken_back_.empty() || !agreed_.empty() || !gathered_.empty()) return {};
    if (closed_) return {Code::left, why_closed_};
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
  for (;;) {
    Gathered frame;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (gathered_.empty()) return {};
      frame = std::move(gathered_.front());
      gathered_.pop_front();
    }
    if (frame.kind == ControlKind::offer) frame.ids.clear();  // the records say it
    HVD_TRY(mesh_.send_control(sequences() ? 1 : 0, frame.kind, frame.ids, frame.bytes));
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
  if (frame.kind == ControlKind::ready) return handle_ready(frame);
  std::vector<TensorId> withdrawn;
  if (frame.kind == ControlKind::withdraw) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const TensorId id : frame.ids) {
      if (take_back(frame.peer, id)) withdrawn.push_back(id);
    }
  } else if (frame.kind == ControlKind::withdrawn && pair()) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const TensorId id : frame.ids) {
      if (take_back(0, id)) taken_back_.push_back(id);
    }
  } else {
    return bad_frame(frame, "what only rank 0 may send");
  }
  if (withdrawn.empty()) return {};
  return mesh_.send_control(frame.peer, ControlKind::withdrawn, withdrawn);
}

Status MeshOrderLog::handle_ready(const ControlFrame& frame) {
  std::string_view text = frame.text;  // records in the order of the ids, of some of them
  uint32_t next = 0;
  std::string_view bytes;
  bool brings = !text.empty();
  if (brings) HVD_TRY(mesh::next_record(frame.peer, text, next, bytes));
  for (const TensorId id : frame.ids) {
    const bool brought = brings && next == id;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!count(frame.peer, id, brought ? &bytes : nullptr)) {
        return bad_frame(frame, "id " + std::to_string(id) + " twice");
      }
    }
    if (!brought) continue;
    brings = !text.empty();
    if (brings) HVD_TRY(mesh::next_record(frame.peer, text, next, bytes));
  }
  return brings ? bad_frame(frame, "small data that belongs to no arrival") : Status();
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
  if (frame.peer == 0 && frame.kind == ControlKind::batch) return handle_batch(frame);
  if (frame.peer == 0 && frame.kind == ControlKind::offer && pair()) return handle_offer(frame);
  if (frame.peer == 0 && frame.kind == ControlKind::withdraw && pair()) return handle_withdraw(frame);
  if (frame.peer != 0 || frame.kind != ControlKind::withdrawn) {
    return bad_frame(frame, "what only goes to rank 0 or comes from it");
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const TensorId id : frame.ids) {
    own_[id].brought = false;  // an offer that comes next is not for this arrival
    entries_.push_back({LogEvent::withdrawn, {id}});
  }
  return {};
}

Status MeshOrderLog::handle_batch(ControlFrame& frame) {
  if (frame.ids.empty()) {
    close(std::move(frame.text));
    return {};
  }
  const bool completed = !frame.text.empty();
  std::string_view text = frame.text;
  for (const TensorId id : frame.ids) {
    Operation* operation = nullptr;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      Own& own = own_[id];
      own.brought = own.offered = false;  // it runs the ordinary way, or is done
      operation = own.operation;
    }
    if (!completed) continue;
    uint32_t record = 0;
    std::string_view bytes;
    HVD_TRY(mesh::next_record(0, text, record, bytes));
    if (record != id || !operation) return bad_frame(frame, "the result of what this rank has not brought");
    HVD_TRY(mesh::take_result(*operation, bytes));
  }
  if (!text.empty()) return bad_frame(frame, "results that belong to no operation");
  entries_.push_back({LogEvent::batch, std::move(frame.ids), completed});
  return {};
}

Status MeshOrderLog::handle_offer(const ControlFrame& frame) {
  for (std::string_view text = frame.text; !text.empty();) {
    uint32_t id = 0;
    std::string_view bytes;
    HVD_TRY(mesh::next_record(0, text, id, bytes));
    if (id >= kMaxIds) return bad_frame(frame, "id " + std::to_string(id));
    const std::lock_guard<std::mutex> lock(mutex_);
    Own& own = own_[id];
    if (own.offered) return bad_frame(frame, "id " + std::to_string(id) + " twice");
    own.offered = true;
    own.offer = bytes;
    match(id);
  }
  return {};
}

// What was offered is given back unless this member has arrived: then its own arrival is on the way, or the result was
// computed already.
Status MeshOrderLog::handle_withdraw(const ControlFrame& frame) {
  std::vector<TensorId> withdrawn;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const TensorId id : frame.ids) {
      Own& own = own_[id];
      own.revoked = own.arrived;
      if (!own.offered || own.arrived) continue;
      own.offered = false;
      withdrawn.push_back(id);
    }
  }
  if (withdrawn.empty()) return {};
  return mesh_.send_control(0, ControlKind::withdrawn, withdrawn);
}

// Lists what was taken back here, computes what came with its bytes, and cuts the rest into batches.
Status MeshOrderLog::decide() {
  std::vector<Agreed> agreed;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    agreed.swap(agreed_);
    for (const TensorId id : taken_back_) entries_.push_back({LogEvent::withdrawn, {id}});
    taken_back_.clear();
    // In nobody's batch yet, and they would need the member that has just gone; except where all bytes are here.
    if (closed_) std::erase_if(agreed, [this](const Agreed& entry) { return entry.plain || !pair(); });
  }
  if (agreed.empty()) return {};
  if (pair()) HVD_TRY(send_gathered());  // nobody may look for what this member has brought to what it now finishes
  // Eager ones first, so that they do not come between others that can be fused.
  const auto plain =
      std::stable_partition(agreed.begin(), agreed.end(), [](const Agreed& entry) { return !entry.plain; });
  HVD_TRY(run({agreed.begin(), plain}));
  std::vector<TensorId> ids;
  for (auto begin = plain; begin < agreed.end(); begin += static_cast<ptrdiff_t>(ids.size())) {
    ids.clear();
    for (auto i = begin; i < agreed.end(); ++i) ids.push_back(i->id);
    ids.resize(std::clamp<size_t>(fuse_(ids.data(), ids.size()), 1, ids.size()));
    HVD_TRY(send_batch(ids, {}));
    entries_.push_back({LogEvent::batch, ids});
  }
  return {};
}

// Computes what came with all its bytes. With more than two members the others wait for the results.
Status MeshOrderLog::run(std::span<const Agreed> agreed) {
  std::vector<TensorId> ids;
  std::string results;
  for (size_t i = 0; i < agreed.size(); ++i) {
    Operation* operation = nullptr;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      operation = own_[agreed[i].id].operation;
    }
    HVD_TRY(mesh::run_eager(*operation, agreed[i].bytes, hosts_));
    ids.push_back(agreed[i].id);
    if (!pair()) mesh::append_record(results, agreed[i].id, mesh::pack_result(*operation));
    if (i + 1 < agreed.size() && results.size() < kEagerFrameBytes) continue;
    if (!pair()) HVD_TRY(send_batch(ids, results));
    entries_.push_back({LogEvent::batch, std::move(ids), true});
    ids.clear();
    results.clear();
  }
  return {};
}

Status MeshOrderLog::send_batch(std::span<const TensorId> ids, std::string_view results) {
  for (int member = 1; member < mesh_.size(); ++member) {
    HVD_TRY(mesh_.send_control(member, ControlKind::batch, ids, results));
  }
  return {};
}

bool MeshOrderLog::report(LogEvent& event) {
  if (entries_.empty()) return false;
  event = std::move(entries_.front());
  entries_.pop_front();
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const TensorId id : event.ids) {
    Own& own = own_[id];
    own.operation = nullptr;
    own.arrived = own.brought = false;
  }
  return true;
}

// From now on nothing more is agreed. False: it is closed already.
bool MeshOrderLog::close(std::string sentence) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (closed_) return false;
  closed_ = true;
  // Nothing that this member has sent since can have reached a sequencer that is gone.
  if (!sequences()) std::erase_if(agreed_, [this](const Agreed& entry) { return own_[entry.id].revoked; });
  why_closed_ = std::move(sentence);
  return true;
}

}  // namespace horovod
