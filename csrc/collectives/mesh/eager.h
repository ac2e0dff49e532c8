// Small operations without a data phase: a member's bytes travel with its arrival in the order log, so that when
// everybody has arrived everything is there, and each member computes the result by itself.
#pragma once

#include <span>
#include <string>

#include "collectives/batch.h"
#include "collectives/hosts.h"

namespace horovod::mesh {

// Should this operation's bytes travel with its arrival, among `size` members?
bool is_eager(const OpSpec& spec, int size);

// Does member `member` contribute to it at all?
inline bool contributes(const OpSpec& spec, int member) {
  return spec.type != OpType::broadcast || spec.root == member;
}

// Appends what member `rank` contributes, scaled if it has to be.
void pack_eager(const Operation& operation, int rank, std::string& bytes);

// The result, from what all contribute (by rank; ignored for members that do not). hosts: null, or in whose order it is
// reduced.
Status run_eager(Operation& operation, std::span<const std::string* const> contributions, const Hosts* hosts = nullptr);

}  // namespace horovod::mesh
