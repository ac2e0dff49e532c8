// hvd.join(): a member without data contributes zeros to the allreduces of the others until all members have joined.
//
// It arrives in the order log with zeros for every allreduce that has an id, ahead of the others and again after each
// run; so the others notice nothing, and no message is needed for what is known. The plan of a name that is new to the
// joined member comes with the operation, because the coordinator counts that member as one that has announced it.
// While a member has joined, the world runs allreduces only. An allreduce that the joined member submitted before, and
// for which it does not wait (Submission::unawaited), takes part with the member's data instead of zeros.
//
// The coordinator says when everybody has joined (coordinator/core/agreement/join.py); the last member never
// contributes zeros. Before anybody goes on all zeros are withdrawn, because they would be taken for arrivals of the
// next step.
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

  // This member joins. Nothing of its own is in flight that anybody waits for.
  void begin(Effects& effects);
  // Why an operation may not be submitted now, or ok.
  Status refusal(const OpSpec& spec) const;

  // What the coordinator says of a round: the ranks that have joined, and why only allreduces can run.
  void apply(const std::vector<int>& ranks, JoinPhase phase, const std::string& sentence, Effects& effects);
  // The coordinator's plan for an operation that this member has not announced.
  void plan(TensorId id, const OpSpec& spec, Effects& effects);
  void recall(const std::vector<TensorId>& ids, Effects& effects);
  // An operation that this member submitted was reduced.
  void ran(Submission& submission, Effects& effects);
  // These zeros were reduced, or are withdrawn.
  void settled(Submission& zeros, Effects& effects);
  // No more zeros are contributed.
  void close() { now_.contributes = false; }

 private:
  struct Round {
    bool joined = false;
    bool contributes = false;  // zeros go out for every allreduce that has an id
    bool ending = false;       // the zeros are being withdrawn, which the coordinator waits for
    std::string others;        // when a member has joined: the coordinator's sentence on it; else empty
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
