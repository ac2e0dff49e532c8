// How the members of an Adasum exchange elements: through the buffers of shared memory or over the mesh.
//
// In a step each member sends the same elements to some others and receives what they send, either of it perhaps
// nothing. Both go in pieces, so that a member computes with one piece while the next ones are on their way. All
// members take every step and know the most that anybody sends in it, so they count rounds of shared memory alike.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "collectives/data_plane.h"
#include "collectives/mesh/reduce_slices.h"

namespace horovod {

class AdasumWire {
 public:
  using Slice = mesh::Slice;

  struct Peer {
    int member;
    Slice received;  // where the elements from this member go: outputs of the list
  };
  struct Step {
    Slice sent;               // inputs of its list
    std::vector<Peer> peers;  // the members that get `sent`
    // Elements, of all members' `sent`; over a mesh it is enough that two members agree that exchange something.
    int64_t longest = 0;
    std::function<void(Slice piece)> before;        // is called before a piece of `sent` is read
    std::function<void(int64_t count)> after = {};  // called when so many elements of each peer are there
  };

  static std::unique_ptr<AdasumWire> over(const DataPlane& plane);
  virtual ~AdasumWire() = default;

  int rank() const { return rank_; }
  int size() const { return size_; }
  // A member may exchange something only with those whose ranks differ from its own by a power of two.
  virtual bool is_sparse() const { return false; }
  Status run(const Step& step);

 protected:
  // ahead: how many pieces are started before the first one is finished.
  AdasumWire(int rank, int size, size_t piece_bytes, int64_t ahead)
      : rank_(rank), size_(size), piece_bytes_(piece_bytes), ahead_(ahead) {}

  Slice piece(const Slice& slice, int64_t index) const;

 private:
  virtual void begin(int64_t /*pieces*/) {}
  virtual Status start(const Step& step, int64_t index) = 0;
  virtual Status finish(const Step& step, int64_t index) = 0;

  const int rank_;
  const int size_;
  const size_t piece_bytes_;
  const int64_t ahead_;
  int64_t piece_elements_ = 1;  // elements of a piece in the step that runs
};

}  // namespace horovod
