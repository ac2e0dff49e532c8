#include "engine/paths.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>

#include <unistd.h>

#include "backends/gloo/backend.h"
#include "collectives/partners.h"
#include "engine/host_channel.h"
#include "engine/shared_order_log.h"

namespace horovod {
namespace {

constexpr size_t kHeaderBytes = 4096;
// Room for an order log in shared memory: that of all members, or that of one host beside a mesh.
constexpr size_t kLogBytes = std::max(sizeof(SharedOrderLog::Memory), sizeof(HostMemory));
static_assert(sizeof(SegmentHeader) <= kHeaderBytes);
constexpr size_t kLeastPartBytes = 64;  // what each rank needs of a buffer at least: a cache line

// Makes a region of the segments of `members`, of whom this rank is one.
Status make_region(const std::vector<int>& members, int me, const std::vector<std::string>& labels, const Paths& paths,
                   const Config& config, AbortSignal& abort, std::unique_ptr<Region>& region) {
  if (config.staging_buffer_bytes < members.size() * kLeastPartBytes) {
    return {Code::invalid_argument, error_code::invalid_setting,
            "staging_buffer_bytes (HOROVOD_STAGING_BUFFER_BYTES) must be at least " + std::to_string(kLeastPartBytes) +
                " for each of the " + std::to_string(members.size()) + " ranks that share memory, but it is " +
                std::to_string(config.staging_buffer_bytes) + "."};
  }
  std::vector<std::shared_ptr<Segment>> segments;
  std::vector<std::string> names;
  int place = 0;
  Status status;
  for (const int member : members) {
    names.push_back(labels[member]);
    if (member == me) {
      place = static_cast<int>(segments.size());
      segments.push_back(paths.segment);
      continue;
    }
    segments.push_back(Segment::open(paths.segment_addresses[member], segment_bytes(config), status));
    if (!segments.back()) return {status.code(), capitalized(labels[member]) + ": " + status.message()};
  }
  region =
      std::make_unique<Region>(place, std::move(segments), std::move(names), kHeaderBytes, kLogBytes, config, abort);
  return {};
}

}  // namespace

size_t segment_bytes(const Config& config) { return kHeaderBytes + Region::area_bytes(config, kLogBytes); }

DescriptorOwner::~DescriptorOwner() {
  for (const auto& [peer, descriptors] : sockets_) {
    for (int descriptor : descriptors) ::close(descriptor);
  }
}

Status attach_to_peers(Communicator& communicator, std::vector<std::string> labels, Paths paths, const Config& config,
                       uint64_t epoch, AbortSignal& abort) {
  DescriptorOwner descriptors(paths.sockets);
  const int size = communicator.size();
  const int rank = communicator.rank();
  if (size == 1) return {};
  const bool segments = paths.segment && static_cast<int>(paths.segment_addresses.size()) == size;
  std::unique_ptr<Region> region;
  if (segments && paths.hosts.empty()) {
    std::vector<int> everyone(static_cast<size_t>(size));
    std::iota(everyone.begin(), everyone.end(), 0);
    HVD_TRY(make_region(everyone, rank, labels, paths, config, abort, region));
    communicator.attach(std::move(region));
    return {};
  }
  if (!paths.hosts.empty() && static_cast<int>(paths.hosts.size()) != size) {
    return {Code::invalid_argument, error_code::internal,
            std::to_string(paths.hosts.size()) + " hosts are given for " + std::to_string(size) +
                " members; there must be one for each."};
  }
  const std::vector<int> partners = partners_of(size, rank, paths.hosts, communicator.placement(), config);
  for (const int partner : partners) {
    if (descriptors.of(partner).empty()) {
      return {Code::invalid_argument, error_code::internal,
              "There is neither shared memory nor a connection to " + labels[partner] + "."};
    }
  }
  std::optional<Hosts> hosts;
  if (!paths.hosts.empty()) {
    hosts.emplace(paths.hosts);
    const std::vector<int>& local = hosts->members(hosts->host(rank));
    if (local.size() > 1 && !segments) {
      return {Code::invalid_argument, error_code::internal,
              capitalized(labels[rank]) + " shares its host, but has no shared memory."};
    }
    if (hosts->count() < 2) {
      hosts.reset();  // no order of hosts is needed, and the connections are enough
    } else if (local.size() > 1) {
      HVD_TRY(make_region(local, rank, labels, paths, config, abort, region));
    }
  }
  if (!config.is_full_mesh(size) && !hosts) hosts = hosts_of_mesh(size, {});
  std::vector<MeshPeer> peers(size);
  for (int member = 0; member < size; ++member) {
    peers[member].label = std::move(labels[member]);
    peers[member].partner = member == rank;
  }
  for (const int partner : partners) {
    MeshPeer& peer = peers[partner];
    peer.partner = true;
    peer.fds = descriptors.take(partner);
    for (const int fd : peer.fds) {
      if (const auto keys = paths.keys.find(fd); keys != paths.keys.end()) peer.keys.push_back(keys->second);
    }
  }
  Status status;
  Config patient = config;
  // A member of another host may wait for a member of its own host. It then names that one in its sentence, which must
  // come before the one about itself.
  if (hosts) patient.progress_timeout_ms += patient.progress_timeout_ms / 4;
  std::unique_ptr<Mesh> mesh = Mesh::create(rank, epoch, std::move(peers), patient, abort, status);
  if (!mesh) return status;
  std::unique_ptr<Backend> backend;
  if (config.gloo) {
    backend = make_gloo_backend(*mesh, abort, status);
    if (!backend) return status;
  }
  communicator.attach(std::move(mesh), std::move(backend), std::move(hosts), std::move(region));
  return {};
}

}  // namespace horovod
