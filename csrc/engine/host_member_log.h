// The order log of a rank whose host has another rank as its leader (host_leader_log.h). It talks to the leader alone,
// and only through shared memory: an arrival is a message in its ring, with the data if they are small.
//
// It still looks at its own connections now and then, so that it learns of ranks that have left or are lost even when
// the leader does not tell it.
#pragma once

#include <atomic>
#include <mutex>
#include <string>
#include <vector>

#include "base/abort.h"
#include "collectives/hosts.h"
#include "engine/host_channel.h"
#include "engine/order_log.h"
#include "transport/mesh.h"
#include "transport/region.h"

namespace horovod {

class HostMemberLog final : public OrderLog {
 public:
  // region: of the ranks of this host, of which this one is not the first.
  HostMemberLog(Mesh& mesh, Region& region, const Hosts& hosts, AbortSignal& abort);

  Status arrive(TensorId id) override { return arrive(id, nullptr); }
  Status arrive_with(TensorId id, Operation& operation) override { return arrive(id, &operation); }
  Status withdraw(TensorId id) override;
  Status poll(LogEvent& event) override;
  Status wait(int64_t until_us) override;
  void wake() override;

 private:
  struct Own {
    Operation* operation = nullptr;
    bool arrived = false;
    bool withdrawn = false;  // withdrawn by this member alone, after the log was closed: the leader's answer is ignored
  };

  Status arrive(TensorId id, Operation* operation);
  Status tell_leader();
  Status take(const HostMessage& message, std::string_view payload, LogEvent& event);
  bool forget(TensorId id, Operation*& operation);
  bool is_withdrawn(TensorId id);
  Status look_around();

  Mesh& mesh_;
  Region& region_;
  const Hosts& hosts_;
  AbortSignal& abort_;
  HostMemory& memory_;  // this member's
  HostMemory& leaders_;
  HostReader from_leader_;

  std::mutex mutex_;  // guards the next block; innermost
  HostWriter to_leader_;
  std::vector<Own> own_;             // by id
  std::vector<TensorId> withdrawn_;  // ids that were withdrawn after the log was closed
  bool closed_ = false;
  std::atomic<bool> starving_{false};  // to_leader_ waits for room; a hint for wait(), set with the lock held

  std::atomic<bool> woken_{false};  // set by wake(), cleared by wait()
  // The rest belongs to the driver.
  std::string why_closed_;
  std::string departed_;  // a member has left, and the leader has not closed the log yet
  int64_t departed_since_us_ = 0;
};

}  // namespace horovod
