// A world of ranks in one process, of which some share memory.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "collectives/hosts.h"
#include "engine/host_leader_log.h"
#include "engine/host_member_log.h"
#include "engine/mesh_order_log.h"
#include "engine/shared_order_log.h"
#include "log_driver.h"
#include "mesh_world.h"
#include "transport/region.h"

namespace horovod::testing {

// Ranks dealt out to hosts; those of one host have a region.
struct HostsWorld : World {
  static constexpr size_t kHeader = 4096;
  static constexpr size_t kLog = std::max(sizeof(SharedOrderLog::Memory), sizeof(HostMemory));

  explicit HostsWorld(const std::vector<int>& host_of, Config config = {}, Wire wire = Wire::tcp)
      : HostsWorld(host_of, config, wire, nullptr) {}

  // sparse: null, or the same hosts.
  HostsWorld(const std::vector<int>& host_of, Config config, Wire wire, const Hosts* sparse)
      : World(static_cast<int>(host_of.size()), wire, 1, config, sparse),
        hosts(host_of),
        areas(host_of.size()),
        regions(host_of.size()) {
    config.staging_buffer_bytes = 4096;
    for (int host = 0; host < hosts.count(); ++host) {
      const std::vector<int>& members = hosts.members(host);
      if (members.size() == 1) continue;
      std::vector<std::shared_ptr<Segment>> segments;
      std::vector<std::string> labels;
      Status status;
      for (const int member : members) {
        segments.push_back(Segment::create(kHeader + Region::area_bytes(config, kLog), true, status));
        CHECK_OK(status);
        labels.push_back(label_of(member));
        areas[member] = segments.back();
      }
      for (size_t place = 0; place < members.size(); ++place) {
        regions[members[place]] = std::make_unique<Region>(static_cast<int>(place), segments, labels, kHeader, kLog,
                                                           config, aborts[members[place]]);
      }
    }
  }
  std::unique_ptr<OrderLog> log(int rank) {
    Region* const region = regions[rank].get();
    if (!region) return MeshOrderLog::make((*this)[rank], kThree, aborts[rank], &hosts);
    if (region->rank() > 0) return std::make_unique<HostMemberLog>((*this)[rank], *region, hosts, aborts[rank]);
    return std::make_unique<HostLeaderLog>((*this)[rank], *region, hosts, kThree, aborts[rank]);
  }
  void leave(int rank) {
    const std::string farewell = coded(error_code::shut_down, label_of(rank) + " has shut down.");
    if (regions[rank]) regions[rank]->announce_end(MemberState::left, farewell);
    meshes[rank]->announce_end(ControlKind::leave, farewell);
  }

  Hosts hosts;
  // By rank; null for one that is alone on its host.
  std::vector<std::shared_ptr<Segment>> areas;
  std::vector<std::unique_ptr<Region>> regions;
};

}  // namespace horovod::testing
