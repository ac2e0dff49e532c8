// The order log of two members: MeshOrderLog, but small operations need no sequencer. Each member sends its bytes to
// the other (`ready` one way, `offer` the other), and a member that has both computes the result at once. That takes
// one message delay instead of the two over a sequencer. These batches have no common order with others, and need none
// because they move no data over a connection when they run.
//
//   offer      sequencer -> member   small data of what the sequencer has arrived at
//   withdraw   sequencer -> member   offers that it withdraws. The member may have used them, so it answers with
//                                    `withdrawn`, or its `ready` is on its way. A sequencer that leaves without either
//                                    has not finished them
#pragma once

#include "engine/mesh_order_log.h"

namespace horovod {

class PairOrderLog final : public MeshOrderLog {
 public:
  PairOrderLog(Mesh& mesh, FuseRule fuse, AbortSignal& abort, const Hosts* hosts);

 private:
  struct Small {             // what this member knows of the small data of an id; guarded by mutex_
    bool brought = false;    // its own bytes travel with its arrival
    std::string bytes;       // its own bytes, kept by the member that is not the sequencer
    bool offered = false;    // the sequencer's bytes have come, and are not used yet
    std::string offer;       // the sequencer's bytes
    bool contested = false;  // the sequencer withdrew its offer after this member had used it
  };

  Status add(TensorId id, std::string* bytes) override;
  void withdraw_own(TensorId id) override;
  void over(TensorId id, bool ran) override;
  void closing() override;
  bool needs_others(bool plain) const override { return plain; }
  Status finish(std::span<const Agreed> agreed) override;
  Status handle_offers(const ControlFrame& frame, bool& known) override;

  void match(TensorId id);
  Status handle_offer(const ControlFrame& frame);
  Status handle_withdraw(const ControlFrame& frame);
  void handle_withdrawn(const ControlFrame& frame);

  std::vector<Small> small_;  // by id
};

}  // namespace horovod
