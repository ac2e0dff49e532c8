// Sends one member's data to all. Members are numbered from the root on; each receives from its parent and passes on.
//
//   flat      small data, few members: the root sends to everybody. One delay.
//   binomial  small data, many members: log2(n) delays.
//   chain     large data: each member passes chunks on to the next, so every wire carries the data once and all are
//             busy at the same time.
//
// In a sparse mesh, which has many members, the chain pays off with larger data only, and the tree passes chunks on,
// too. The edges of both are powers of two in a circle of all members, whichever is the root, so they are between
// partners.
#include <bit>
#include <cstring>

#include "collectives/mesh/collectives.h"
#include "transport/packets.h"

namespace horovod::mesh {
namespace {

constexpr int64_t kChainBytes = 64 << 10;
constexpr int64_t kChunkBytes = 4 * packets::kBytes;
constexpr int kFlatMembers = 8;
constexpr int64_t kWindow = 4;  // chunks that a member expects at the same time

// How many chunks make a chain in a sparse mesh worth its n steps: each chunk costs the chain one turn, and the root of
// the tree one turn for each of its log2(n) children.
int64_t sparse_chain_bytes(int n) {
  const int children = std::bit_width(static_cast<unsigned>(n - 1));
  return kChunkBytes * n / std::max(children - 1, 1);
}

// The members from which a member receives and to which it sends, as distances from the root.
struct Tree {
  int parent = -1;
  std::vector<int> children;

  static Tree flat(int n, int me) {
    Tree tree;
    if (me > 0) tree.parent = 0;
    for (int i = 1; me == 0 && i < n; ++i) tree.children.push_back(i);
    return tree;
  }
  static Tree chain(int n, int me) {
    Tree tree;
    tree.parent = me - 1;
    if (me + 1 < n) tree.children.push_back(me + 1);
    return tree;
  }
  // Clearing the lowest bit set leads to the parent; the subtrees below a member differ in the lower bits.
  static Tree binomial(int n, int me) {
    Tree tree;
    if (me > 0) tree.parent = me & (me - 1);
    int mask = 1;
    while (mask < n && (me & mask) == 0) mask <<= 1;
    for (mask >>= 1; mask > 0; mask >>= 1) {  // the deepest subtree first
      if (me + mask < n) tree.children.push_back(me + mask);
    }
    return tree;
  }
};

}  // namespace

Status broadcast(Mesh& mesh, Batch batch) {
  if (batch.empty() || batch[0]->spec.tensors.empty()) return {};
  const int n = mesh.size();
  const int root = batch[0]->spec.root;
  if (root < 0 || root >= n) {
    return {Code::invalid_argument, error_code::internal,
            "Broadcast from rank " + std::to_string(root) + " of " + std::to_string(n) + "."};
  }
  const SpanList list(batch);
  const int64_t elements = list.elements();
  const int64_t bytes = elements * static_cast<int64_t>(list.element_bytes());
  const bool is_root = mesh.rank() == root;
  const int me = (mesh.rank() - root + n) % n;
  const bool full = mesh.is_full();
  const bool large = bytes > (full ? kChainBytes : sparse_chain_bytes(n)) && n > 2;
  const Tree tree = large ? Tree::chain(n, me) : full && n <= kFlatMembers ? Tree::flat(n, me) : Tree::binomial(n, me);
  const int64_t chunk =
      large || !full ? kChunkBytes / static_cast<int64_t>(list.element_bytes()) : std::max<int64_t>(elements, 1);
  const int64_t chunks = (elements + chunk - 1) / chunk;
  const auto end = [&](int64_t index) { return std::min((index + 1) * chunk, elements); };
  std::vector<Flight> arrivals(kWindow);
  Flight sent;
  const auto expect = [&](int64_t index) {
    std::vector<Transfer> receives(1, {(tree.parent + root) % n, {}});
    list.outputs(index * chunk, end(index), receives[0].pieces);
    return mesh.start({}, receives, arrivals[index % kWindow]);
  };
  for (int64_t c = 0; !is_root && c < std::min(chunks, kWindow); ++c) HVD_TRY(expect(c));
  for (int64_t c = 0; c < chunks; ++c) {
    if (!is_root) HVD_TRY(mesh.finish(arrivals[c % kWindow]));
    std::vector<Transfer> sends;
    for (const int child : tree.children) {
      Transfer& send = sends.emplace_back(Transfer{(child + root) % n, {}});
      is_root ? list.inputs(c * chunk, end(c), send.pieces) : list.outputs(c * chunk, end(c), send.pieces);
    }
    HVD_TRY(mesh.start(sends, {}, sent));
    if (!is_root && c + kWindow < chunks) HVD_TRY(expect(c + kWindow));
  }
  if (is_root) {
    list.visit(0, elements, [&](const std::byte* input, std::byte* output, int64_t count, int64_t) {
      if (output && output != input) std::memcpy(output, input, static_cast<size_t>(count) * list.element_bytes());
    });
  }
  return mesh.finish(sent);
}

}  // namespace horovod::mesh
