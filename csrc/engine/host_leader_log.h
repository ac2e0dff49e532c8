// The order log of the rank that speaks for its host, its leader. It counts the arrivals of the host's ranks. When all
// of them have arrived at an id, the host arrives in the log between hosts (mesh_order_log.h), with their contributions
// combined. The leader passes on what is agreed there to its host's other ranks (host_member_log.h), in shared memory.
// So one frame for each host crosses the network, and only the leaders ever wait for the network.
//
// A rank's arrival is withdrawn at once while its host has not arrived in the log between hosts. Afterwards the host's
// arrival must be withdrawn first; the arrivals of the host's other ranks stay, with their bytes, and count again.
//
// An operation ends on this rank only when the other ranks of the host can read its result or batch. So they can finish
// whatever this rank has finished.
#pragma once

#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/abort.h"
#include "collectives/hosts.h"
#include "engine/host_channel.h"
#include "engine/mesh_order_log.h"
#include "transport/mesh.h"
#include "transport/region.h"

namespace horovod {

class HostLeaderLog final : public OrderLog, private Mesh::PollSource {
 public:
  // region: of the ranks of this host, of which this one is the first.
  HostLeaderLog(Mesh& mesh, Region& region, const Hosts& hosts, FuseRule fuse, AbortSignal& abort);

  Status arrive(TensorId id) override { return arrive(id, nullptr); }
  Status arrive_with(TensorId id, Operation& operation) override { return arrive(id, &operation); }
  Status withdraw(TensorId id) override;
  Status poll(LogEvent& event) override;
  Status wait(int64_t until_us) override;
  void wake() override { between_->wake(); }

  // As MeshOrderLog::watch(), by rank in the mesh. Ranks of another host are reported when all of them have arrived.
  void watch(MeshOrderLog::Watch watch);

 private:
  struct Count {
    Operation* operation = nullptr;  // this rank's
    uint32_t arrived = 0;
    uint32_t plain = 0;      // how many of the arrivals brought no bytes
    bool forwarded = false;  // the host has arrived in the log between hosts
    std::vector<bool> here;  // by place on the host: whether that rank has arrived
    std::vector<bool> brought;
    std::vector<bool> withdrawing;  // by place on the host: whether it asked to withdraw after the host had arrived
    std::vector<std::string> bytes;
  };

  Status arrive(TensorId id, Operation* operation);
  // With mutex_ held:
  Status count(size_t place, TensorId id, const std::string_view* bytes);
  void take_out(size_t place, TensorId id);
  Status withdraw_of(size_t place, TensorId id, bool& taken_out);

  Status read_members();
  Status take(const HostMessage& message, size_t place, std::string_view payload);
  void answer(size_t place, TensorId id);
  void publish(const LogEvent& event);
  bool host_withdrawn(TensorId id);
  Status look_at_members();
  bool news() override;
  void sleeping(bool asleep) override { memory_.asleep.value.store(asleep ? 1 : 0); }

  Mesh& mesh_;
  Region& region_;
  const Hosts& hosts_;
  const int host_;
  AbortSignal& abort_;
  HostMemory& memory_;  // this rank's
  MeshOrderLog::Watch watch_;
  const std::unique_ptr<MeshOrderLog> between_;

  std::mutex mutex_;  // guards the next block; taken before the lock of between_
  std::vector<Count> counts_;
  std::vector<TensorId> withdrawn_;  // withdrawn ids of this rank, to be reported by poll()

  // The rest belongs to the driver.
  std::vector<HostReader> members_;  // members_[place on the host - 1]
  HostWriter to_members_;
  std::optional<LogEvent> held_;  // an event that poll() keeps back until the members can read its data
  int64_t looked_us_ = 0;         // when look_at_members() last looked
  bool departure_told_ = false;
  bool closing_told_ = false;
};

}  // namespace horovod
