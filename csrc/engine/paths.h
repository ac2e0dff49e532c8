// How a communicator reaches its peers: through segments of shared memory, through sockets, or through both.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/communicator.h"

namespace horovod {

// How the members of a world or of a process set reach each other.
struct Paths {
  std::shared_ptr<Segment> segment;            // this member's segment, for shared memory
  std::vector<std::string> segment_addresses;  // the addresses of every member's segment
  std::map<int, std::vector<int>> sockets;     // for TCP: world's rank -> descriptors; owned by the engine from now on
  std::map<int, wire::Keys> keys;              // descriptor -> its keys, where Config::wire is not plain
  std::vector<int> hosts;  // beside sockets: equal for ranks that share memory as well; empty: no ranks do
};

// Owns descriptors of sockets, by peer. Its end closes those that have not been handed over.
class DescriptorOwner {
 public:
  explicit DescriptorOwner(std::map<int, std::vector<int>>& sockets) : sockets_(std::move(sockets)) {}
  DescriptorOwner(const DescriptorOwner&) = delete;
  DescriptorOwner& operator=(const DescriptorOwner&) = delete;
  ~DescriptorOwner();
  const std::vector<int>& of(int peer) { return sockets_[peer]; }
  std::vector<int> take(int peer) { return std::exchange(sockets_[peer], {}); }
  std::map<int, std::vector<int>> release() { return std::exchange(sockets_, {}); }

 private:
  std::map<int, std::vector<int>> sockets_;
};

// How many bytes the segment of a member has.
size_t segment_bytes(const Config& config);

// Maps the peers' segments and takes over the sockets of `paths`, which are numbered by member, and gives both to
// `communicator`. labels: one for each member.
Status attach_to_peers(Communicator& communicator, std::vector<std::string> labels, Paths paths, const Config& config,
                       uint64_t epoch, AbortSignal& abort);

}  // namespace horovod
