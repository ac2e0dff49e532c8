// Sends every member's rows to every member (Bruck et al., "Efficient algorithms for all-to-all communications in
// multiport message-passing systems", 1997, section 4). After the step of distance d a member has what it and the next
// 2d - 1 members in the circle brought. First announcements go this way, and then the rows, straight to their final
// places.
#include <cstring>

#include "collectives/rows.h"
#include "collectives/sparse/announcement.h"
#include "collectives/sparse/collectives.h"

namespace horovod::sparse {
namespace {

// place(first, count, pieces) appends the places of the data of `count` members, beginning with the first-th member
// after this one.
template <typename Place>
Status gather_in_circle(Mesh& mesh, Place&& place) {
  const int n = mesh.size();
  for (int distance = 1; distance < n; distance *= 2) {
    const int count = std::min(distance, n - distance);
    Transfer send{(mesh.rank() + n - distance) % n, {}};
    Transfer receive{(mesh.rank() + distance) % n, {}};
    place(0, count, send.pieces);
    place(distance, count, receive.pieces);
    HVD_TRY(mesh.exchange({&send, 1}, {&receive, 1}));
  }
  return {};
}

}  // namespace

Status allgather(Hierarchy& hierarchy, Batch batch) {
  Mesh& mesh = *hierarchy.mesh;
  const int n = mesh.size();
  const int me = mesh.rank();
  std::vector<int64_t> rows;
  std::vector<iovec> inputs;
  for (Operation* operation : batch) {
    for (size_t t = 0; t < operation->spec.tensors.size(); ++t) {
      const TensorSpec& tensor = operation->spec.tensors[t];
      rows.push_back(tensor.rows());
      inputs.push_back(
          {const_cast<std::byte*>(operation->spans[t].input), static_cast<size_t>(tensor.rows() * tensor.row_bytes())});
    }
  }
  const AnnouncementFormat format(n, batch);
  // The announcements of all members, by their place in the circle of ranks: place 0 is this member's own.
  std::vector<int64_t> announced(format.words() * static_cast<size_t>(n));
  const auto announcement = [&](int place) { return announced.data() + format.words() * static_cast<size_t>(place); };
  format.write(announcement(0), rows, inputs);
  HVD_TRY(gather_in_circle(mesh, [&](int first, int count, std::vector<iovec>& pieces) {
    pieces.push_back({announcement(first), format.bytes() * static_cast<size_t>(count)});
  }));
  bool have_data = true;
  for (int place = 0; place < n; ++place) {
    HVD_TRY(format.check(announcement(place), (me + place) % n));
    have_data = have_data && format.has_data(announcement(place));
  }

  // begins[tensor][member]: where the member's rows begin in the tensor's result; begins[tensor][n]: its end.
  std::vector<std::vector<std::byte*>> begins;
  // told[member]: the part of the member's data in its announcement that has not been copied yet.
  std::vector<const std::byte*> told(static_cast<size_t>(n));
  for (int member = 0; member < n; ++member) told[member] = format.data(announcement((member + n - me) % n));
  for (Operation* operation : batch) {
    operation->outputs.resize(operation->spec.tensors.size());
    for (size_t t = 0; t < operation->spec.tensors.size(); ++t) {
      const size_t tensor = begins.size();  // the number of the tensor in the whole batch
      int64_t total = 0;
      for (int place = 0; place < n; ++place) total += format.rows(announcement(place), tensor);
      HVD_TRY(make_rows(*operation, t, total));
      std::byte* at = operation->outputs[t].data.get();
      begins.emplace_back();
      for (int member = 0; member < n; ++member) {
        const size_t bytes = format.bytes_of_rows(announcement((member + n - me) % n), tensor);
        const void* from = member == me ? inputs[tensor].iov_base : have_data ? told[member] : nullptr;
        if (from && bytes > 0) std::memcpy(at, from, bytes);
        if (have_data) told[member] += bytes;
        begins[tensor].push_back(at);
        at += bytes;
      }
      begins[tensor].push_back(at);
    }
  }
  if (have_data) return {};
  return gather_in_circle(mesh, [&](int first, int count, std::vector<iovec>& pieces) {
    const int begin = (me + first) % n;
    const int end = std::min(begin + count, n);
    const int rest = count - (end - begin);  // members past the last one: 0, 1, ...
    for (const std::vector<std::byte*>& of : begins) {
      pieces.push_back({of[begin], static_cast<size_t>(of[end] - of[begin])});
      pieces.push_back({of[0], static_cast<size_t>(of[rest] - of[0])});
    }
  });
}

}  // namespace horovod::sparse
