// Small operations without a data phase: a member's bytes travel with its arrival in the order log, and the result is
// computed where they meet.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "collectives/batch.h"
#include "collectives/hosts.h"

namespace horovod::mesh {

// Whether the bytes of this operation travel with its arrival, in a communicator of `size` members.
bool is_eager(const OpSpec& spec, int size);

// The bytes that member `rank` contributes, prescaled if need be; none where it contributes nothing (broadcast).
size_t eager_bytes(const Operation& operation, int rank);
void pack_eager(const Operation& operation, int rank, std::byte* bytes);
std::string pack_eager(const Operation& operation, int rank);

// Combines the contributions of the members of one host, in the order of hosts.h.
Status combine_host(const Operation& operation, const Hosts& hosts, int host,
                    std::span<const std::string> contributions, std::string& combined);

// The order in which the contributions are reduced: from the first to the last, or that of a sparse mesh
// (sparse/balanced.h).
enum class Order { sequential, balanced };

// Computes the result from all contributions: by rank, or by host if `hosts` is not null.
Status run_eager(Operation& operation, std::span<const std::string> contributions, const Hosts* hosts = nullptr,
                 Order order = Order::sequential);

// Hand a result from the member that has computed it to another one: pack_result() reads it from the outputs of the
// first, take_result() writes it to the outputs of the second.
size_t result_bytes(const Operation& operation);
void pack_result(const Operation& operation, std::byte* bytes);
std::string pack_result(const Operation& operation);
Status take_result(Operation& operation, std::string_view bytes);

}  // namespace horovod::mesh
