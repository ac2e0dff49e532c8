// Small operations without a data phase: a member's bytes travel with its arrival in the order log, and the result is
// computed where they meet.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "collectives/batch.h"
#include "collectives/hosts.h"

namespace horovod::mesh {

// Should this operation's bytes travel with its arrival, among `size` members?
bool is_eager(const OpSpec& spec, int size);

// What member `rank` contributes, scaled if it has to be; nothing for a member that does not (broadcast).
std::string pack_eager(const Operation& operation, int rank);

// The result, from what all contribute, by rank. hosts: null, or in whose order it is reduced.
Status run_eager(Operation& operation, std::span<const std::string> contributions, const Hosts* hosts = nullptr);

// The result as another member has computed it: taken from its outputs, put into ours.
std::string pack_result(const Operation& operation);
Status take_result(Operation& operation, std::string_view bytes);

}  // namespace horovod::mesh
