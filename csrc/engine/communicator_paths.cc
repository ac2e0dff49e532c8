// Chooses the order log and the algorithms of a communicator by how its members reach each other.
#include "engine/communicator.h"
#include "engine/host_leader_log.h"
#include "engine/host_member_log.h"
#include "engine/mesh_order_log.h"
#include "engine/shared_order_log.h"

namespace horovod {

void Communicator::attach(std::unique_ptr<Region> region) {
  region_ = std::move(region);
  plane_.region = region_.get();
  region_->while_waiting([this] { return device_.watch(); });
  log_ = std::make_unique<SharedOrderLog>(
      *region_, [this](const TensorId* ids, size_t count) { return fuse(ids, count); }, abort_);
  driver_.start(*log_, config_.background_cpu);
}

void Communicator::attach(std::unique_ptr<Mesh> mesh, std::unique_ptr<Backend> backend, std::optional<Hosts> hosts,
                          std::unique_ptr<Region> region) {
  mesh_ = std::move(mesh);
  backend_ = std::move(backend);
  region_ = std::move(region);
  plane_.mesh = mesh_.get();
  plane_.backend = backend_.get();
  mesh_->while_waiting([this] {
    if (region_) region_->beat();
    return device_.watch();
  });
  if (region_) region_->while_waiting([this] { return device_.watch(); });
  if (hosts) {
    hierarchy_ = std::make_unique<Hierarchy>(mesh_.get(), region_.get(), std::move(*hosts),
                                             config_.staging_buffer_bytes * Region::kWide);
    plane_.hierarchy = hierarchy_.get();
    if (region_) region_->set_network_progress([this](bool& busy) { return mesh_->progress(busy); });
  }
  make_mesh_log();
  driver_.start(*log_, config_.background_cpu);
}

void Communicator::make_mesh_log() {
  const FuseRule fuse = [this](const TensorId* ids, size_t count) { return this->fuse(ids, count); };
  const Hosts* const hosts = hierarchy_ ? &hierarchy_->hosts : nullptr;
  const auto watch = [this](int member, TensorId id, Arrival what) {
    if (timeline_.active()) [[unlikely]]
      timeline_.arrival(members_.process_set, members_.ranks[member], id, what);
  };
  if (hosts && region_ && region_->rank() > 0) {
    log_ = std::make_unique<HostMemberLog>(*mesh_, *region_, *hosts, abort_);
  } else if (hosts && region_) {
    auto log = std::make_unique<HostLeaderLog>(*mesh_, *region_, *hosts, fuse, abort_);
    log->watch(watch);
    log_ = std::move(log);
  } else {
    auto log = MeshOrderLog::make(*mesh_, fuse, abort_, hosts);
    log->watch([watch, hosts](int member, TensorId id, Arrival what) {
      if (!hosts || what == Arrival::last) return watch(hosts ? hosts->leader(member) : member, id, what);
      for (const int rank : hosts->members(member)) watch(rank, id, what);
    });
    log_ = std::move(log);
  }
}

}  // namespace horovod
