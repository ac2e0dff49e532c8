// Acts on what the coordinator says: ids of operations, disagreements between ranks, ids that it recalls, ranks that
// have joined, peers that have left.
#include <algorithm>
#include <cstdlib>

#include "base/clock.h"
#include "base/limits.h"
#include "engine/communicator.h"

namespace horovod {

void Communicator::apply_plan(const std::string& name, TensorId id, const OpSpec* spec) {
  const std::lock_guard<std::mutex> lock(driver_.mutex());
  if (id >= kMaxIds) return refuse_id("gave " + name, id);
  if (!table_.plan(name, id, effects_) && spec && ended_.ok()) join_.plan(id, *spec, effects_);
  apply_effects();
}

// This rank can't do what the others now do with the id, so the epoch ends.
void Communicator::refuse_id(const std::string& what, TensorId id) {
  abort_.raise({Code::internal, error_code::unexpected_data,
                "The coordinator " + what + " an id that there is not: " + without_code(bad_id(id).message()) +
                    " Use one release of horovod on all hosts."});
  if (log_) log_->wake();
}

// Between hosts a member that withdraws an arrival asks another: the sequencer, the other one of two, or the leader of
// its host. That member may have nothing pending and so would not listen. But the coordinator tells all members of the
// cause (an error, a recall), so a member that may be asked listens for a while.
void Communicator::serve_peers() {
  if (!mesh_ || (rank() != 0 && size() > 2 && (!hierarchy_ || (region_ && region_->rank() > 0)))) return;
  serving_until_us_ = now_us() + limits::kServeUs;
  driver_.wake_background();
}

void Communicator::apply_errors(const std::vector<std::pair<std::string, std::string>>& errors,
                                const std::vector<TensorId>& ids) {
  const std::lock_guard<std::mutex> lock(driver_.mutex());
  serve_peers();
  for (const auto& [name, sentence] : errors) table_.refuse(name, {Code::precondition, sentence}, effects_);
  recall(ids);
  if (!apply_effects()) return;
  driver_.wake_waiting();
  log_->wake();
}

void Communicator::apply_recall(const std::vector<TensorId>& ids) {
  const std::lock_guard<std::mutex> lock(driver_.mutex());
  serve_peers();
  recall(ids);
  apply_effects();
}

std::vector<TensorId> Communicator::apply_recall_of_idle(const std::vector<TensorId>& ids) {
  const std::lock_guard<std::mutex> lock(driver_.mutex());
  std::vector<TensorId> idle, busy;
  for (const TensorId id : ids) (table_.arrived(id) ? busy : idle).push_back(id);
  recall(idle);
  apply_effects();
  return busy;
}

void Communicator::recall(const std::vector<TensorId>& ids) {
  for (const TensorId id : ids) {
    if (id >= kMaxIds) return refuse_id("recalls", id);
  }
  if (!ids.empty()) join_.recall(ids, effects_);
}

void Communicator::apply_join(uint32_t round, const std::vector<int>& ranks, JoinPhase phase,
                              const std::string& sentence) {
  if (!log_) return;
  const std::lock_guard<std::mutex> lock(driver_.mutex());
  if (!ended_.ok() || !closed_.ok() || round != join_.round() || ranks.empty()) return;  // over, or told again
  serve_peers();
  join_.apply(ranks, phase, sentence, effects_);
  apply_effects();
  driver_.wake_waiting();
  driver_.wake_background();
  log_->wake();
}

Status Communicator::join(int64_t timeout_us, int64_t& ticket, int& last_rank) {
  last_rank = -1;
  if (!log_) {
    last_rank = members_.ranks[members_.rank];
    return {};
  }
  const int64_t deadline = now_us() + timeout_us;
  Driver::Lock lock(driver_.mutex());
  for (;;) {
    if (ticket != kNoTicket && join_.round() > ticket) {
      last_rank = join_.last_rank();
      return {};
    }
    if (const Status& over = ended_.ok() ? closed_ : ended_; !over.ok()) {
      return {over.code(), with_more(over.message(), " (Rank " + members_.own_rank() + " was in hvd.join().)")};
    }
    const int64_t left = deadline - now_us();
    if (left <= 0) return {};
    const std::shared_ptr<Submission> own = ticket == kNoTicket && !join_.joined() ? table_.any_awaited() : nullptr;
    if (own) {
      lock.unlock();
      wait(*own, left);  // an error is reported to the thread that collects the result
      lock.lock();
      continue;
    }
    if (ticket == kNoTicket) {
      ticket = join_.round();
      if (!join_.joined()) {
        join_.begin(effects_);
        apply_effects();
        driver_.wake_background();
      }
    }
    driver_.sleep(lock, left);
  }
}

// Each tensor has memory of its own for its result, as a batch may send reduced elements from there.
bool Communicator::make_zeros(Submission& zeros) {
  const OpSpec& spec = zeros.spec;
  if (spec.device == DeviceKind::gpu) [[unlikely]] {
    Status failed = device_.backend()
                        ? device_.backend()->add_zeros(zeros)
                        : Status(Code::internal, error_code::wrong_gpu,
                                 "it has not used a GPU tensor in this process set, so it does not know on which "
                                 "GPU. Name it: hvd.join(device), or let every rank take part in one operation there "
                                 "before.");
    if (failed.ok()) return true;
    abort_.raise({Code::internal, "Rank " + members_.own_rank() + " has joined, but can't contribute zeros to " +
                                      spec.name + " on a GPU: " + failed.message()});
    return false;
  }
  for (const TensorSpec& tensor : spec.tensors) {
    const int64_t count = tensor.elements();
    const size_t bytes = std::max<size_t>(1, static_cast<size_t>(count) * size_of(tensor.dtype));
    OutputBuffer input, result;
    input.data = {static_cast<std::byte*>(std::calloc(1, bytes)), std::free};  // never written: costs no pages if large
    if (!input.data || !result.allocate(bytes)) {
      abort_.raise({Code::internal, error_code::out_of_memory,
                    "Rank " + members_.own_rank() + " has joined, but has no memory for the " + std::to_string(bytes) +
                        " bytes of " + spec.name + "."});
      return false;
    }
    zeros.spans.push_back({input.data.get(), result.data.get(), count});
    zeros.outputs.push_back(std::move(input));
    zeros.outputs.push_back(std::move(result));
  }
  return true;
}

void Communicator::add_counts(std::map<std::string, uint64_t>& counts) const {
  counts["announced"] += counters_.announced.load();
  counts["submitted"] += counters_.submitted.load();
  counts["agreed"] += counters_.agreed.load();
  counts["batches"] += counters_.batches.load();
  counts["bytes"] += counters_.bytes.load();
  counts["waited_us"] += driver_.waited_us();
  counts["gathers"] += driver_.gathers();
  counts["sleeps"] += region_ ? region_->sleeps() : 0;
}

void Communicator::peer_left(int left, const std::string& sentence) {
  const std::vector<int>& ranks = members_.ranks;
  if (!log_ || left == ranks[rank()] || !std::binary_search(ranks.begin(), ranks.end(), left)) return;
  const std::lock_guard<std::mutex> lock(driver_.mutex());
  if (!left_sentence_.empty()) return;
  left_sentence_ = sentence;
  left_since_us_ = now_us();
}

}  // namespace horovod
