#include "collectives/hosts.h"

#include <algorithm>
#include <map>

#include "kernels/kernels.h"

namespace horovod {
namespace {

constexpr int64_t kPieceBytes = 4 << 10;  // the hosts' results of a piece stay in the first-level cache

}  // namespace

Hosts::Hosts(const std::vector<int>& host_of) {
  std::map<int, int> number;  // the caller's number of a host -> the host's number here
  for (size_t member = 0; member < host_of.size(); ++member) {
    const auto [found, is_new] = number.emplace(host_of[member], count());
    if (is_new) members_.emplace_back();
    std::vector<int>& here = members_[found->second];
    host_.push_back(found->second);
    place_.push_back(here.size());
    here.push_back(static_cast<int>(member));
  }
}

void Hosts::reduce(const Reduction& reduction, std::byte* output, const void* const* inputs, int64_t count) const {
  const auto item = static_cast<int64_t>(size_of(reduction.dtype));
  const int64_t piece = kPieceBytes / item;
  std::vector<std::byte> results(members_.size() * static_cast<size_t>(std::min(piece, count) * item));
  std::vector<const void*> here, hosts(members_.size());
  for (int64_t begin = 0; begin < count; begin += piece) {
    const auto n = static_cast<size_t>(std::min(piece, count - begin));
    const auto at = [&](int member) { return static_cast<const std::byte*>(inputs[member]) + begin * item; };
    for (size_t host = 0; host < members_.size(); ++host) {
      const std::vector<int>& members = members_[host];
      if (members.size() == 1) {
        hosts[host] = at(members[0]);
        continue;
      }
      here.clear();
      for (const int member : members) here.push_back(at(member));
      std::byte* result = results.data() + host * n * static_cast<size_t>(item);
      kernels::reduce(reduction.dtype, reduction.op, result, here.data(), static_cast<int>(here.size()), n, 1.0);
      hosts[host] = result;
    }
    kernels::reduce(reduction.dtype, reduction.op, output + begin * item, hosts.data(), static_cast<int>(hosts.size()),
                    n, reduction.postscale);
  }
}

void reduce_members(const Hosts* hosts, const Reduction& reduction, std::byte* output, const void* const* inputs,
                    int size, int64_t count) {
  if (hosts) {
    hosts->reduce(reduction, output, inputs, count);
  } else {
    kernels::reduce(reduction.dtype, reduction.op, output, inputs, size, static_cast<size_t>(count),
                    reduction.postscale);
  }
}

}  // namespace horovod
