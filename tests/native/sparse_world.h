// A world of ranks in one process whose mesh is sparse: each rank is connected to its partners only.
#pragma once

#include <deque>
#include <vector>

#include "collectives/data_plane.h"
#include "collectives/hierarchical/collectives.h"
#include "hosts_world.h"

namespace horovod::testing {

struct SparseWorld : HostsWorld {
  // host_of: of each rank; those of one host share memory.
  explicit SparseWorld(const std::vector<int>& host_of, Config config = {}, Wire wire = Wire::pair)
      : SparseWorld(host_of, Hosts(host_of), sparse(config), wire) {}

  DataPlane plane(int rank) {
    DataPlane plane;
    plane.mesh = meshes[rank].get();
    plane.hierarchy = &hierarchies[rank];
    return plane;
  }

  std::deque<Hierarchy> hierarchies;  // by rank

 private:
  static Config sparse(Config config) {
    config.full_mesh_members = 1;
    return config;
  }
  SparseWorld(const std::vector<int>& host_of, const Hosts& hosts, Config config, Wire wire)
      : HostsWorld(host_of, config, wire, &hosts) {
    for (int rank = 0; rank < size(); ++rank) {
      Region* const region = regions[rank].get();
      hierarchies.push_back({meshes[rank].get(), region, hosts, 4096 * Region::kWide});
      if (!region) continue;
      Mesh* const mesh = meshes[rank].get();
      region->set_network_progress([mesh](bool& busy) { return mesh->progress(busy); });
      mesh->while_waiting([region] {
        region->beat();
        return Status();
      });
    }
  }
};

}  // namespace horovod::testing
