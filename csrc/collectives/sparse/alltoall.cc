// Sends each row to its destination from partner to partner, as parcels.h describes.
#include <cstring>

#include "collectives/rows.h"
#include "collectives/sparse/collectives.h"
#include "collectives/sparse/parcels.h"

namespace horovod::sparse {

Status alltoall(Hierarchy& hierarchy, Batch batch) {
  Mesh& mesh = *hierarchy.mesh;
  const int n = mesh.size();
  const int me = mesh.rank();
  const auto to = [&](int member) { return (member + n - me) % n; };  // number of the parcel for a member
  const auto from = [&](int member) { return (me + n - member) % n; };
  std::vector<std::vector<int64_t>> rows(static_cast<size_t>(n));  // by receiver
  std::vector<std::vector<iovec>> inputs(static_cast<size_t>(n));
  for (Operation* operation : batch) {
    for (size_t t = 0; t < operation->spec.tensors.size(); ++t) {
      std::vector<int64_t> splits;
      HVD_TRY(splits_of(*operation, t, n, splits));
      const int64_t row_bytes = operation->spec.tensors[t].row_bytes();
      auto* at = const_cast<std::byte*>(operation->spans[t].input);
      for (int member = 0; member < n; ++member) {
        const auto bytes = static_cast<size_t>(splits[member] * row_bytes);
        rows[member].push_back(splits[member]);
        inputs[member].push_back({at, bytes});
        at += bytes;
      }
    }
  }
  const AnnouncementFormat format(n, batch);
  Parcels parcels(mesh, format);
  for (int member = 0; member < n; ++member) {
    int64_t* announcement = parcels.announcement(to(member));
    format.write(announcement, rows[member], inputs[member]);
    if (!format.has_data(announcement)) parcels.sources[to(member)] = inputs[member];
  }
  HVD_TRY(parcels.exchange_announcements());

  std::vector<const std::byte*> told(static_cast<size_t>(n));  // where the rest of each member's announcement begins
  for (int member = 0; member < n; ++member) {
    const int64_t* announcement = parcels.announcement(from(member));
    if (format.has_data(announcement)) told[member] = format.data(announcement);
  }
  size_t tensor = 0;  // number of the tensor in the whole batch
  for (Operation* operation : batch) {
    operation->outputs.resize(operation->spec.tensors.size());
    for (size_t t = 0; t < operation->spec.tensors.size(); ++t, ++tensor) {
      int64_t total = 0;
      for (int member = 0; member < n; ++member) {
        const std::string sender = "Rank " + std::to_string(member) + " of the mesh";
        const int64_t count = format.rows(parcels.announcement(from(member)), tensor);
        HVD_TRY(add_split(*operation, t, member, n, sender, count, total));
      }
      HVD_TRY(make_rows(*operation, t, total));
      std::byte* at = operation->outputs[t].data.get();
      for (int member = 0; member < n; ++member) {
        const size_t bytes = format.bytes_of_rows(parcels.announcement(from(member)), tensor);
        const void* here = member == me ? inputs[me][tensor].iov_base : told[member];
        if (here && bytes > 0) std::memcpy(at, here, bytes);
        if (told[member]) told[member] += bytes;
        parcels.goals[from(member)].push_back({at, bytes});
        at += bytes;
      }
    }
  }
  return parcels.exchange_rows();
}

}  // namespace horovod::sparse
