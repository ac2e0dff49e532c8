#include "engine/pair_order_log.h"

#include "collectives/mesh/eager_records.h"

namespace horovod {

PairOrderLog::PairOrderLog(Mesh& mesh, FuseRule fuse, AbortSignal& abort, const Hosts* hosts)
    : MeshOrderLog(mesh, std::move(fuse), abort, hosts), small_(kMaxIds) {}

Status PairOrderLog::add(TensorId id, std::string* bytes) {
  Small& small = small_[id];
  small.brought = small.contested = false;
  if (sequences()) {
    small.brought = bytes && gather(ControlKind::offer, id, bytes);
    return count_own(id, small.brought ? bytes : nullptr);
  }
  small.brought = gather(ControlKind::ready, id, bytes);
  if (bytes) small.bytes = std::move(*bytes);
  match(id);
  return {};
}

void PairOrderLog::withdraw_own(TensorId id) {
  if (!sequences() || !small_[id].brought || closed_) {
    MeshOrderLog::withdraw_own(id);
  } else if (counts_[id].members[0]) {
    gather(ControlKind::withdraw, id);
  }
}

// An arrival is over, so its offer must not be taken for the next one: its batch ran with the offered bytes or without.
void PairOrderLog::over(TensorId id, bool ran) {
  small_[id].brought = false;
  if (ran) small_[id].offered = false;
}

// A sequencer that has left did not read the messages that this member has sent since then.
void PairOrderLog::closing() {
  if (!sequences()) std::erase_if(agreed_, [this](const Agreed& entry) { return small_[entry.id].contested; });
}

// Whether the member that is not the sequencer has arrived, with its bytes, at an id that was offered.
void PairOrderLog::match(TensorId id) {
  Small& small = small_[id];
  if (!small.brought || !small.offered) return;
  agree(id, false);
  agreed_.back().bytes.push_back(std::move(small.offer));
  agreed_.back().bytes.push_back(std::move(small.bytes));
  small.brought = small.offered = false;
  own_[id].settled = true;
}

Status PairOrderLog::finish(std::span<const Agreed> agreed) {
  if (agreed.empty()) return {};
  std::vector<TensorId> ids;
  for (const Agreed& one : agreed) {
    Operation* operation = nullptr;
    HVD_TRY(compute(one, operation));
    ids.push_back(one.id);
  }
  entries_.push_back({LogEvent::batch, std::move(ids), true});
  return {};
}

Status PairOrderLog::handle_offers(const ControlFrame& frame, bool& known) {
  known = true;
  if (!sequences() && frame.kind == ControlKind::offer) return handle_offer(frame);
  if (!sequences() && frame.kind == ControlKind::withdraw) return handle_withdraw(frame);
  known = sequences() && frame.kind == ControlKind::withdrawn;
  if (known) handle_withdrawn(frame);
  return {};
}

Status PairOrderLog::handle_offer(const ControlFrame& frame) {
  for (std::string_view text = frame.text; !text.empty();) {
    uint32_t id = 0;
    std::string_view bytes;
    HVD_TRY(mesh::next_record(0, text, id, bytes));
    if (id >= kMaxIds) return bad_frame(frame, "id " + std::to_string(id));
    const std::lock_guard<std::mutex> lock(mutex_);
    Small& small = small_[id];
    if (small.offered) return bad_frame(frame, "id " + std::to_string(id) + " twice");
    small.offered = true;
    small.offer = bytes;
    match(id);
  }
  return {};
}

// An offer is withdrawn unless this member has used it, or has arrived without bytes: then its own arrival is on the
// way. An arrival that is settled (its batch or its withdrawal has come) is an earlier one, which did not use this
// offer.
Status PairOrderLog::handle_withdraw(const ControlFrame& frame) {
  std::vector<TensorId> withdrawn;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const TensorId id : frame.ids) {
      Small& small = small_[id];
      if (!small.offered) {
        small.contested = own_[id].arrived;
        continue;
      }
      if (own_[id].arrived && !own_[id].settled) continue;
      small.offered = false;
      withdrawn.push_back(id);
    }
  }
  if (withdrawn.empty()) return {};
  return mesh_.send_control(0, ControlKind::withdrawn, withdrawn);
}

void PairOrderLog::handle_withdrawn(const ControlFrame& frame) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const TensorId id : frame.ids) {
    if (uncount(0, id)) report_withdrawn(id);
  }
}

}  // namespace horovod
