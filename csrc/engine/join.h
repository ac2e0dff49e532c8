// hvd.join(): a member without data contributes zeros to the allreduces of the others until all members have joined.
//
// The joined member arrives in the order log with zeros for every allreduce that has an id, ahead of the others and
// again after each run. So the others need not know of it, and an operation that has an id needs no message. An
// operation that is new to the joined member comes with its plan, because the coordinator counts that member as having
// announced it. While a member has joined, the world runs allreduces only. An allreduce that the joined member
// submitted before, and for which it does not wait (Submission::unawaited), takes part with the member's data instead
// of zeros.
//
// The coordinator says when everybody has joined (coordinator/core/agreement/join.py); the last member never
// contributes zeros. All zeros are withdrawn before any member goes on, because the log would take them for arrivals of
// the next step.
//
// Pure, like the tensor table that it stands on, and guarded by the same lock.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "engine/tensor_table.h"

namespace horovod {

// Numbers equal horovod.protos.v1.JoinPhase.
enum class JoinPhase : uint8_t { open = 0, ending = 1, over = 2 };

class Join {
 public:
  // Gives the operation a span of zeros and room for a result for each of its spec's tensors. False where there is no
  // memory for that.
  using MakeZeros = std::function<bool(Submission&)>;

  // rank: this member's in the world.
  Join(TensorTable& table, int rank, MakeZeros make_zeros)
      : table_(table), rank_(rank), make_zeros_(std::move(make_zeros)) {}

  uint32_t round() const { return round_; }     // how many rounds are over
  int last_rank() const { return last_rank_; }  // the rank that joined last in the latest round that is over
  bool joined() const { return now_.joined; }   // a thread of this member is in join(), or was interrupted there

  // This member joins. It must have no operation in flight for which a thread waits.
  void begin(Effects& effects);
  // Why an operation may not be submitted now, or ok.
  Status refusal(const OpSpec& spec) const;

  // Takes what the coordinator says of a round: the ranks that have joined, and why only allreduces can run.
  void apply(const std::vector<int>& ranks, JoinPhase phase, const std::string& sentence, Effects& effects);
  // Takes the coordinator's plan for an operation that this member has not announced.
  void plan(TensorId id, const OpSpec& spec, Effects& effects);
  void recall(const std::vector<TensorId>& ids, Effects& effects);
  // Takes note that an operation which this member submitted was reduced.
  void ran(Submission& submission, Effects& effects);
  // Takes note that these zeros were reduced or are withdrawn.
  void settled(Submission& zeros, Effects& effects);
  // Stops contributing zeros.
  void close() { now_.contributes = false; }

 private:
  struct Round {
    bool joined = false;
    bool contributes = false;  // this member contributes zeros to every allreduce that has an id
    bool ending = false;       // the zeros are being withdrawn, which the coordinator waits for
    std::string others;        // the coordinator's sentence about the members that have joined; empty when none has
  };

  void contribute(Effects& effects);
  void refuse_others(Effects& effects);
  void withdraw_zeros(Effects& effects);
  void tell(bool without_zeros, Effects& effects);

  TensorTable& table_;
  const int rank_;
  const MakeZeros make_zeros_;
  uint32_t round_ = 0;
  int last_rank_ = -1;
  Round now_;
  size_t zeros_ = 0;  // submissions of zeros in flight
};

}  // namespace horovod
