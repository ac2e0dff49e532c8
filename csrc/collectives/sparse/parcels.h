// Sends bytes from each member to each other member over a sparse mesh (Bruck et al., "Efficient algorithms for
// all-to-all communications in multiport message-passing systems", 1997, section 3). What one member sends to another
// is a parcel; its number is how far the receiver is from the sender in the circle of all members. In the step of
// distance 1, 2, 4, ... every member passes those parcels whose numbers have this bit to the member at this distance.
// So at any time a member holds one parcel of each number, and after the last step those that are for it.
//
// A parcel is of any length. First announcements go this way, from which each member learns how long the parcels are
// that will pass it; then the rows, from the sender's input through the memory of others into the receiver's result.
// Between two steps others keep what they have not passed on yet, and nothing else.
#pragma once

#include "collectives/operation.h"
#include "collectives/sparse/announcement.h"
#include "transport/mesh.h"

namespace horovod::sparse {

class Parcels {
 public:
  Parcels(Mesh& mesh, const AnnouncementFormat& format);

  // By number. Until exchange_announcements() of what this member sends, to be written before; afterwards of what it
  // receives.
  int64_t* announcement(int number) { return announced_.data() + format_.words() * static_cast<size_t>(number); }
  Status exchange_announcements();

  // By number, to be filled before exchange_rows(): where the rows lie that this member sends, and where those go that
  // it receives. Parcels whose announcements have the data are left out.
  std::vector<std::vector<iovec>> sources;
  std::vector<std::vector<iovec>> goals;
  Status exchange_rows();

 private:
  std::vector<int> passed_at(int distance) const;
  Status step(int distance, Transfer& send, Transfer& receive);
  Status make_room(int distance, const std::vector<uint64_t>& bytes);

  Mesh& mesh_;
  const AnnouncementFormat& format_;
  const int n_;
  std::vector<int64_t> announced_;
  std::vector<std::vector<uint64_t>> bytes_in_;    // bytes_in_[step][number]: how many bytes of rows come in
  std::vector<std::vector<OutputBuffer>> relays_;  // relays_[step]: memory for parcels passed on in that step
};

}  // namespace horovod::sparse
