#include "engine/mesh_order_log.h"

#include <algorithm>

#include "base/clock.h"
#include "base/limits.h"
#include "collectives/mesh/eager.h"
#include "collectives/mesh/eager_records.h"
#include "engine/pair_order_log.h"

namespace horovod {
namespace {

// More small data than this goes faster in an ordinary exchange.
constexpr size_t kEagerFrameBytes = 64u << 10;

}  // namespace

std::unique_ptr<MeshOrderLog> MeshOrderLog::make(Mesh& mesh, FuseRule fuse, AbortSignal& abort, const Hosts* hosts) {
  if ((hosts ? hosts->count() : mesh.size()) == 2) {
    return std::make_unique<PairOrderLog>(mesh, std::move(fuse), abort, hosts);
  }
  return std::make_unique<MeshOrderLog>(mesh, std::move(fuse), abort, hosts);
}

MeshOrderLog::MeshOrderLog(Mesh& mesh, FuseRule fuse, AbortSignal& abort, const Hosts* hosts)
    : mesh_(mesh),
      fuse_(std::move(fuse)),
      abort_(abort),
      hosts_(hosts),
      tree_(hosts ? hosts->count() : mesh.size(), hosts ? hosts->host(mesh.rank()) : mesh.rank(), mesh.is_full()),
      own_(kMaxIds) {
  const int size = hosts ? hosts->count() : mesh.size();
  member_of_peer_.resize(static_cast<size_t>(mesh.size()), -1);
  for (int member = 0; member < size; ++member) {
    peers_.push_back(hosts ? hosts->leader(member) : member);
    member_of_peer_[static_cast<size_t>(peers_.back())] = member;
  }
  if (sequences()) counts_.resize(kMaxIds);
  std::vector<int> neighbours;
  if (!sequences()) neighbours.push_back(peers_[tree_.parent()]);
  for (const int child : tree_.children()) neighbours.push_back(peers_[child]);
  mesh.listen_to(neighbours);
}

// -- any thread -------------------------------------------------------------------------------------------------------

Status MeshOrderLog::arrive(TensorId id, Operation* operation, std::string* combined) {
  if (id >= kMaxIds) return bad_id(id);
  bool wake = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    Own& own = own_[id];
    own.operation = operation;
    own.arrived = true;
    own.settled = false;
    std::string packed;
    if (!combined && operation && mesh::is_eager(operation->spec, size())) {
      packed = mesh::pack_eager(*operation, mesh_.rank());
      combined = &packed;
    }
    HVD_TRY(add(id, combined));
    wake = waiting_ && (any_gathered_.load(std::memory_order_relaxed) || any_decided_.load(std::memory_order_relaxed));
  }
  if (wake) mesh_.wake();
  return {};
}

Status MeshOrderLog::withdraw(TensorId id) {
  if (id >= kMaxIds) return bad_id(id);
  bool wake = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (closed_ && !sequences()) {  // the operation can't be agreed on any more
      const bool agreed = std::any_of(agreed_.begin(), agreed_.end(), [id](const Agreed& a) { return a.id == id; });
      if (!agreed) report_withdrawn(id);
    } else {
      withdraw_own(id);
    }
    wake = waiting_;
  }
  if (wake) mesh_.wake();
  return {};
}

Status MeshOrderLog::add(TensorId id, std::string* bytes) {
  if (sequences()) return count_own(id, bytes);
  gather(ControlKind::ready, id, bytes);
  return {};
}

void MeshOrderLog::withdraw_own(TensorId id) {
  if (!sequences()) {
    gather(ControlKind::withdraw, id);
  } else if (uncount(0, id)) {
    report_withdrawn(id);
  }
}

Status MeshOrderLog::count_own(TensorId id, const std::string* bytes) {
  const std::string_view brought = bytes ? std::string_view(*bytes) : std::string_view();
  if (count(0, id, bytes ? &brought : nullptr)) return {};
  return {Code::internal, error_code::internal,
          "This rank has arrived twice at id " + std::to_string(id) + " of the order log."};
}

// Returns whether the bytes travel with the id. They don't where there are none, or where the frame is full.
bool MeshOrderLog::gather(ControlKind kind, TensorId id, const std::string* bytes) {
  if (gathered_.empty() || gathered_.back().kind != kind || gathered_.back().ids.size() == kMaxIds) {
    gathered_.push_back({kind, {}, {}});
  }
  Gathered& frame = gathered_.back();
  frame.ids.push_back(id);
  any_gathered_.store(true, std::memory_order_relaxed);
  if (!bytes || frame.bytes.size() >= kEagerFrameBytes) return false;
  mesh::append_record(frame.bytes, id, *bytes);
  return true;
}

void MeshOrderLog::agree(TensorId id, bool plain) {
  agreed_.push_back({id, plain, {}});
  any_decided_.store(true, std::memory_order_relaxed);
}

void MeshOrderLog::report_withdrawn(TensorId id) {
  withdrawn_.push_back(id);
  any_decided_.store(true, std::memory_order_relaxed);
}

bool MeshOrderLog::count(int member, TensorId id, const std::string_view* bytes) {
  Count& count = counts_[id];
  if (count.members.empty()) {
    count.members.resize(peers_.size());
    count.brought.resize(peers_.size());
    count.bytes.resize(peers_.size());
  }
  if (count.members[member]) return false;
  count.members[member] = true;
  count.brought[member] = bytes != nullptr;
  count.plain += bytes ? 0 : 1;
  if (bytes) count.bytes[member] = *bytes;
  if (watch_) watch_(member, id, Arrival::counted);
  if (++count.arrived < peers_.size() || (closed_ && needs_others(count.plain > 0))) return true;
  if (watch_) watch_(member, id, Arrival::last);
  agree(id, count.plain > 0);
  if (count.plain == 0) {
    agreed_.back().bytes.resize(peers_.size());
    agreed_.back().bytes.swap(count.bytes);
  }
  count.arrived = 0;
  count.plain = 0;
  std::fill(count.members.begin(), count.members.end(), false);
  return true;
}

bool MeshOrderLog::uncount(int member, TensorId id) {
  Count& count = counts_[id];
  if (count.members.empty() || !count.members[member]) return false;
  count.members[member] = false;
  if (watch_) watch_(member, id, Arrival::withdrawn);
  --count.arrived;
  count.plain -= count.brought[member] ? 0 : 1;
  return true;
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

Status MeshOrderLog::wait(int64_t until_us) {
  if (abort_.raised()) return abort_.cause();
  HVD_TRY(send_gathered());
  if (!entries_.empty()) return {};
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!withdrawn_.empty() || !agreed_.empty() || !gathered_.empty()) return {};
    if (closed_) return {Code::left, why_closed_};
    waiting_ = true;  // from here on arrive() and withdraw() wake this thread
  }
  // A member that has left is no reason to stop before everything agreed has come, and only the sequencer knows when
  // that is. It closes the log when it drives; when it does not for so long, nothing is on its way either.
  if (!departed_.empty()) until_us = std::min(until_us, departed_since_us_ + limits::kDepartureGraceUs);
  Status status = mesh_.wait(until_us - now_us());
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    waiting_ = false;
  }
  HVD_TRY(std::move(status));
  if (!departed_.empty() && now_us() - departed_since_us_ >= limits::kDepartureGraceUs) {
    HVD_TRY(receive());  // the last look before sleeping
    // The members below this one in a tree are told as well, as this member passes nothing on from now on.
    return entries_.empty() ? close_for_all(departed_, 0) : Status();
  }
  return {};
}

Status MeshOrderLog::send_gathered() {
  while (any_gathered_.load(std::memory_order_relaxed)) {
    Gathered frame;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      frame = std::move(gathered_.front());
      gathered_.pop_front();
      any_gathered_.store(!gathered_.empty(), std::memory_order_relaxed);
    }
    if (frame.kind == ControlKind::offer) frame.ids.clear();  // the records hold the ids
    HVD_TRY(sequences() ? mesh_.send_control(peers_[1], frame.kind, frame.ids, frame.bytes)
                        : send_up(frame.kind, frame.ids, frame.bytes));
  }
  return {};
}

Status MeshOrderLog::receive() {
  ControlFrame frame;
  for (bool found = true;;) {
    HVD_TRY(mesh_.next_control(frame, found));
    if (!found) return {};
    HVD_TRY(handle(frame));
  }
}

// Lists withdrawn ids of this member, computes the results of operations that came with their bytes, and cuts the rest
// into batches.
Status MeshOrderLog::decide() {
  if (!any_decided_.load(std::memory_order_relaxed)) return {};
  std::vector<Agreed> agreed;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    any_decided_.store(false, std::memory_order_relaxed);
    agreed.swap(agreed_);
    for (const TensorId id : withdrawn_) entries_.push_back({LogEvent::withdrawn, {id}});
    withdrawn_.clear();
    // These ids are in no member's batch yet, and may need the member that has just left.
    if (closed_) std::erase_if(agreed, [this](const Agreed& entry) { return needs_others(entry.plain); });
  }
  if (agreed.empty()) return {};
  HVD_TRY(send_gathered());  // the other one of two members waits for the bytes of this one
  // Eager operations come first, so that they do not separate others that can be fused.
  const auto plain =
      std::stable_partition(agreed.begin(), agreed.end(), [](const Agreed& entry) { return !entry.plain; });
  HVD_TRY(finish({agreed.begin(), plain}));
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

Status MeshOrderLog::compute(const Agreed& agreed, Operation*& operation) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    operation = own_[agreed.id].operation;
  }
  return mesh::run_eager(*operation, agreed.bytes, hosts_,
                         mesh_.is_full() ? mesh::Order::sequential : mesh::Order::balanced);
}

// The other members wait for the results.
Status MeshOrderLog::finish(std::span<const Agreed> agreed) {
  std::vector<TensorId> ids;
  std::string results;
  for (size_t i = 0; i < agreed.size(); ++i) {
    Operation* operation = nullptr;
    HVD_TRY(compute(agreed[i], operation));
    ids.push_back(agreed[i].id);
    mesh::append_record(results, agreed[i].id, mesh::pack_result(*operation));
    if (i + 1 < agreed.size() && results.size() < kEagerFrameBytes) continue;
    HVD_TRY(send_batch(ids, results));
    entries_.push_back({LogEvent::batch, std::move(ids), true});
    ids.clear();
    results.clear();
  }
  return {};
}

Status MeshOrderLog::send_batch(std::span<const TensorId> ids, std::string_view text, int except) {
  for (const int child : tree_.children()) {
    if (child != except) HVD_TRY(mesh_.send_control(peers_[child], ControlKind::batch, ids, text));
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
    own.arrived = own.settled = false;
    over(id, false);
  }
  return true;
}

Status MeshOrderLog::close_for_all(const std::string& sentence, int except) {
  return close(sentence) ? send_batch({}, sentence, except) : Status();
}

Status MeshOrderLog::depart(const std::string& sentence) {
  HVD_TRY(send_gathered());
  if (sequences()) return close_for_all(sentence, 0);
  return send_up(ControlKind::closing, {}, sentence);
}

// Closes the log: from now on nothing more is agreed. False: it is closed already.
bool MeshOrderLog::close(std::string sentence) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (closed_) return false;
  closed_ = true;
  closing();
  why_closed_ = std::move(sentence);
  return true;
}

}  // namespace horovod
