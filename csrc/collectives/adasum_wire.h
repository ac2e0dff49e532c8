// How the members of an Adasum exchange elements: through the buffers of shared memory or over the mesh.
//
// In a step each member sends the same elements to some other members and receives what those send; it may send nothing
// or receive nothing. Elements go in pieces, so that a member computes with one piece while the next ones are on their
// way. All members take every step and know the most that anybody sends in it, so they count rounds of shared memory
// alike.
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
    // The largest number of elements that any member sends in the step. Over a mesh it need only be equal on each two
    // members that exchange elements.
    int64_t longest = 0;
    std::function<void(Slice piece)> before;        // is called before a piece of `sent` is read
    std::function<void(int64_t count)> after = {};  // is called when `count` more elements of each peer have come
  };

  static std::unique_ptr<AdasumWire> over(const DataPlane& plane);
  virtual ~AdasumWire() = default;

  int rank() const { return rank_; }
  int size() const { return size_; }
  // A member may exchange elements only with members whose ranks differ from its own by a power of two.
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
