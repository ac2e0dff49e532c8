// Small operations without a data phase: a member's bytes travel with its arrival in the order log, and the result is
// computed where they meet.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "collectives/batch.h"
#include "collectives/hosts.h"

namespace horovod::mesh {

// Whether this operation's bytes are to travel with its arrival, among `size` members.
bool is_eager(const OpSpec& spec, int size);

// What member `rank` contributes, scaled if it has to be: so many bytes, none for a member that does not (broadcast).
size_t eager_bytes(const Operation& operation, int rank);
void pack_eager(const Operation& operation, int rank, std::byte* bytes);
std::string pack_eager(const Operation& operation, int rank);

// What the members of one host contribute as a whole, in the order of hosts.h. contributions: of these members.
Status combine_host(const Operation& operation, const Hosts& hosts, int host,
                    std::span<const std::string> contributions, std::string& combined);

// In which order the contributions are reduced: from the first to the last, or as over a sparse mesh
// (sparse/balanced.h).
enum class Order { sequential, balanced };

// The result, from what all contribute: by rank, or by host if `hosts` is not null.
Status run_eager(Operation& operation, std::span<const std::string> contributions, const Hosts* hosts = nullptr,
                 Order order = Order::sequential);

// The result as another member has computed it: taken from its outputs, put into ours.
size_t result_bytes(const Operation& operation);
void pack_result(const Operation& operation, std::byte* bytes);
std::string pack_result(const Operation& operation);
Status take_result(Operation& operation, std::string_view bytes);

}  // namespace horovod::mesh
