// Which members of a mesh have connections to each other.
//
// In a full mesh each of n members has n - 1 connections. In a sparse one, which worlds of more than
// Config::full_mesh_members members have, a member is connected to its partners only, about 2 log2 n of them:
//
//   circle   members whose numbers differ by a power of two, counted in a circle of all members. Among them are the
//            partners of recursive halving and doubling (r xor 2^k), of binomial trees from any root and of a chain.
//   rails    the same in a circle of hosts, for members with the same place on their hosts, as far as every host has
//            one. The first rail are the hosts' leaders, which speak for their hosts in the order log.
//   host     the leader of a host and its other members, which wake it.
//
// A host here is a group of members that share memory. Where no members do, the rails are the circle. The first members
// of each machine, among which Adasum of tensors on GPUs runs, form a rail as well, even where the members of a machine
// share no memory.
#pragma once

#include <vector>

#include "base/config.h"
#include "collectives/hosts.h"

namespace horovod {

// The hosts of a mesh of `size` members: those given, or one for each member where no members share memory or all do.
Hosts hosts_of_mesh(int size, const std::vector<int>& given);

// Members [0, rail_count()) of each host have counterparts on every other.
int rail_count(const Hosts& hosts);

// The partners of a member in a sparse mesh, ascending. machines: the machine of each member; null: the same as
// `hosts`.
std::vector<int> partners_of(const Hosts& hosts, int member, const Hosts* machines = nullptr);

// The members to which `member` of a mesh needs connections, ascending: its partners, or all others. hosts: as for
// hosts_of_mesh(). machines: the machine of each member; empty: the same as `hosts`.
std::vector<int> partners_of(int size, int member, const std::vector<int>& hosts, const std::vector<int>& machines,
                             const Config& config);

}  // namespace horovod
