// What the frames of a mesh's order log mean to whom.
#include "base/clock.h"
#include "collectives/mesh/eager.h"
#include "collectives/mesh/eager_records.h"
#include "engine/mesh_order_log.h"

namespace horovod {
namespace {

std::string unexpected(TensorId id) { return "id " + std::to_string(id) + ", which this rank does not wait for,"; }

}  // namespace

Status MeshOrderLog::bad_frame(const ControlFrame& frame, const std::string& what) const {
  return {Code::aborted, "Rank " + std::to_string(frame.peer) + " of the mesh sent " + what +
                             " in a frame of the order log; this epoch can't go on."};
}

Status MeshOrderLog::handle(ControlFrame& frame) {
  for (const TensorId id : frame.ids) {
    if (id >= kMaxIds) return bad_frame(frame, "id " + std::to_string(id));
  }
  if (frame.kind == ControlKind::abort) return {Code::aborted, frame.text};
  if (frame.kind == ControlKind::nudge) return {};
  const int member = member_of_peer_[static_cast<size_t>(frame.peer)];
  if (frame.kind == ControlKind::leave && (member < 0 || (member > 0 && !sequences()))) {
    if (departed_.empty()) {
      departed_ = std::move(frame.text);
      departed_since_us_ = now_us();
    }
    return {};
  }
  if (member < 0) return bad_frame(frame, "what only the first rank of a host may send");
  bool known = false;
  HVD_TRY(handle_offers(frame, known));
  if (known) return {};
  return sequences() ? handle_as_sequencer(member, frame) : handle_as_member(member, frame);
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
  return mesh_.send_control(frame.peer, ControlKind::withdrawn, withdrawn);
}

Status MeshOrderLog::handle_ready(int member, const ControlFrame& frame) {
  std::string_view text = frame.text;  // records in the order of the ids, of some of them
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
  if (member == 0 && frame.kind == ControlKind::leave) {
    close(std::move(frame.text));
    return {};
  }
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
