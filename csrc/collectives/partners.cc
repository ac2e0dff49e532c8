#include "collectives/partners.h"

#include <algorithm>
#include <numeric>
#include <set>

namespace horovod {
namespace {

// Calls visit(place) for the places whose distance from `me` in a circle of `size` is a power of two.
template <typename Visit>
void visit_circle(int size, int me, Visit&& visit) {
  for (int distance = 1; distance < size; distance *= 2) {
    visit((me + distance) % size);
    visit((me + size - distance) % size);
  }
}

}  // namespace

Hosts hosts_of_mesh(int size, const std::vector<int>& given) {
  if (!given.empty()) {
    Hosts hosts(given);
    if (hosts.count() > 1) return hosts;
  }
  std::vector<int> apart(static_cast<size_t>(size));
  std::iota(apart.begin(), apart.end(), 0);
  return Hosts(apart);
}

int rail_count(const Hosts& hosts) {
  size_t least = hosts.members(0).size();
  for (int host = 1; host < hosts.count(); ++host) least = std::min(least, hosts.members(host).size());
  return static_cast<int>(least);
}

std::vector<int> partners_of(const Hosts& hosts, int member, const Hosts* machines) {
  std::set<int> partners;
  visit_circle(hosts.size(), member, [&](int other) { partners.insert(other); });
  const int host = hosts.host(member);
  const std::vector<int>& here = hosts.members(host);
  const auto place = static_cast<size_t>(std::find(here.begin(), here.end(), member) - here.begin());
  if (place < static_cast<size_t>(rail_count(hosts))) {
    visit_circle(hosts.count(), host, [&](int other) { partners.insert(hosts.members(other)[place]); });
  }
  if (place == 0) {
    partners.insert(here.begin() + 1, here.end());
  } else {
    partners.insert(here[0]);
  }
  if (machines && machines->leader(machines->host(member)) == member) {
    visit_circle(machines->count(), machines->host(member),
                 [&](int other) { partners.insert(machines->leader(other)); });
  }
  return {partners.begin(), partners.end()};
}

std::vector<int> partners_of(int size, int member, const std::vector<int>& hosts, const std::vector<int>& machines,
                             const Config& config) {
  if (!config.is_full_mesh(size)) {
    const Hosts placed = hosts_of_mesh(size, machines);
    return partners_of(hosts_of_mesh(size, hosts), member, machines.empty() ? nullptr : &placed);
  }
  std::vector<int> others;
  for (int other = 0; other < size; ++other) {
    if (other != member) others.push_back(other);
  }
  return others;
}

}  // namespace horovod
