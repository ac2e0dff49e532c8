// Handles the frames of a mesh's order log, by kind and by receiver.
#include <cstring>

#include "base/clock.h"
#include "collectives/mesh/eager.h"
#include "collectives/mesh/eager_records.h"
#include "engine/mesh_order_log.h"

namespace horovod {
namespace {

// Stands in front of the text of a frame that goes along a tree, and names the member that it comes from or is for.
using Stamp = uint32_t;

std::string stamped(int member, std::string_view text) {
  const auto stamp = static_cast<Stamp>(member);
  std::string stamped(reinterpret_cast<const char*>(&stamp), sizeof(stamp));
  return stamped.append(text);
}

// Reads the stamp; -1: there is none of one of `size` members.
int stamp_of(std::string_view text, int size) {
  Stamp stamp = 0;
  if (text.size() < sizeof(stamp)) return -1;
  std::memcpy(&stamp, text.data(), sizeof(stamp));
  return stamp < static_cast<Stamp>(size) ? static_cast<int>(stamp) : -1;
}

std::string unexpected(TensorId id) { return "id " + std::to_string(id) + ", which this rank does not wait for,"; }

}  // namespace

Status MeshOrderLog::bad_frame(const ControlFrame& frame, const std::string& what) const {
  return {Code::aborted, error_code::unexpected_data,
          "Rank " + std::to_string(frame.peer) + " of the mesh sent " + what +
              " in a frame of the order log; this world ends."};
}

Status MeshOrderLog::handle(ControlFrame& frame) {
  for (const TensorId id : frame.ids) {
    if (id >= kMaxIds) return bad_frame(frame, "id " + std::to_string(id));
  }
  if (frame.kind == ControlKind::abort) return {Code::aborted, frame.text};
  if (frame.kind == ControlKind::nudge) return {};
  int member = member_of_peer_[static_cast<size_t>(frame.peer)];
  bool known = false;
  HVD_TRY(departure(member, frame, known));
  if (known) return {};
  if (member < 0) return bad_frame(frame, "what only the first rank of a host may send");
  if (!tree_.is_star()) HVD_TRY(route(frame, member, known));
  if (known) return {};
  HVD_TRY(handle_offers(frame, known));
  if (known) return {};
  return sequences() ? handle_as_sequencer(member, frame) : handle_as_member(member, frame);
}

// A rank says that it leaves. Only the sequencer knows what is agreed, and closes the log.
Status MeshOrderLog::departure(int member, ControlFrame& frame, bool& handled) {
  handled = frame.kind == ControlKind::leave && !(member >= 0 && sequences()) && member != tree_.parent();
  if (!handled || !departed_.empty()) return {};
  departed_ = std::move(frame.text);
  departed_since_us_ = now_us();
  // In a tree the sequencer may have no connection to it, and the parent of the one that has left may have nothing to
  // do and so not listen: everybody who hears of it tells the sequencer, once.
  return !tree_.is_star() && member > 0 ? depart(departed_) : Status();
}

// In a tree: passes on frames that are for another member, and finds out who sent the others.
Status MeshOrderLog::route(ControlFrame& frame, int& member, bool& passed_on) {
  if (frame.kind == ControlKind::leave) return {};
  const int neighbour = member;
  const bool from_parent = !sequences() && neighbour == tree_.parent();
  if (frame.kind == ControlKind::batch) {
    // Refused even from the sequencer: a batch that bypasses the parent would reach no member below it.
    if (!from_parent) return bad_frame(frame, "a batch that comes by way of the parent only");
    member = 0;
    return send_batch(frame.ids, frame.text);
  }
  const int stamp = stamp_of(frame.text, size());
  if (stamp < 0) return bad_frame(frame, "what is from or for no member of the log");
  if (frame.kind == ControlKind::withdrawn) {
    if (!from_parent || (stamp != this->member() && tree_.towards(stamp) < 0)) {
      return bad_frame(frame, "what is for a member that it does not reach this way");
    }
    passed_on = stamp != this->member();
    if (passed_on) return mesh_.send_control(peers_[tree_.towards(stamp)], frame.kind, frame.ids, frame.text);
    member = 0;
  } else {
    if (frame.kind != ControlKind::ready && frame.kind != ControlKind::withdraw && frame.kind != ControlKind::closing) {
      return bad_frame(frame, "what does not go along a tree");
    }
    if (tree_.towards(stamp) != neighbour) return bad_frame(frame, "what is from a member that it is no way from");
    passed_on = !sequences();
    if (passed_on) return mesh_.send_control(peers_[tree_.parent()], frame.kind, frame.ids, frame.text);
    member = stamp;
  }
  frame.text.erase(0, sizeof(Stamp));
  return {};
}

Status MeshOrderLog::send_up(ControlKind kind, std::span<const TensorId> ids, std::string_view text) {
  const int parent = peers_[tree_.parent()];
  if (tree_.is_star()) return mesh_.send_control(parent, kind, ids, text);
  return mesh_.send_control(parent, kind, ids, stamped(member(), text));
}

Status MeshOrderLog::send_withdrawn(int member, std::span<const TensorId> ids) {
  const int next = peers_[tree_.towards(member)];
  return mesh_.send_control(next, ControlKind::withdrawn, ids, tree_.is_star() ? std::string() : stamped(member, {}));
}

Status MeshOrderLog::handle_as_sequencer(int member, ControlFrame& frame) {
  if (frame.kind == ControlKind::leave) return close_for_all(frame.text, member);
  if (frame.kind == ControlKind::closing) return close_for_all(frame.text, 0);
  if (frame.kind == ControlKind::ready) return handle_ready(member, frame);
  if (frame.kind != ControlKind::withdraw) return bad_frame(frame, "what only rank 0 may send");
  std::vector<TensorId> withdrawn;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const TensorId id : frame.ids) {
      if (uncount(member, id)) withdrawn.push_back(id);
    }
  }
  if (withdrawn.empty()) return {};
  return send_withdrawn(member, withdrawn);
}

Status MeshOrderLog::handle_ready(int member, const ControlFrame& frame) {
  std::string_view text = frame.text;  // records of some of the ids, in their order
  uint32_t next = 0;
  std::string_view bytes;
  bool brings = !text.empty();
  if (brings) HVD_TRY(mesh::next_record(frame.peer, text, next, bytes));
  for (const TensorId id : frame.ids) {
    const bool brought = brings && next == id;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!count(member, id, brought ? &bytes : nullptr)) {
        return bad_frame(frame, "id " + std::to_string(id) + " twice");
      }
    }
    if (!brought) continue;
    brings = !text.empty();
    if (brings) HVD_TRY(mesh::next_record(frame.peer, text, next, bytes));
  }
  return brings ? bad_frame(frame, "small data that belongs to no arrival") : Status();
}

Status MeshOrderLog::handle_as_member(int member, ControlFrame& frame) {
  // A parent passes on all that is agreed before it leaves, and nothing comes after that.
  if (frame.kind == ControlKind::leave) return close_for_all(frame.text, 0);
  if (member == 0 && frame.kind == ControlKind::batch) return handle_batch(frame);
  if (member != 0 || frame.kind != ControlKind::withdrawn) {
    return bad_frame(frame, "what only goes to rank 0 or comes from it");
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const TensorId id : frame.ids) {
    Own& own = own_[id];
    if (!own.arrived || own.settled) return bad_frame(frame, "the withdrawal of " + unexpected(id));
    own.settled = true;
    over(id, false);
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
      if (!own.arrived || own.settled) return bad_frame(frame, "a batch with " + unexpected(id));
      own.settled = true;
      over(id, true);
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

}  // namespace horovod
