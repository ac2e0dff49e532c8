#include "collectives/sparse/tree.h"

#include <algorithm>
#include <array>
#include <bit>
#include <new>

#include "kernels/kernels.h"
#include "transport/packets.h"

namespace horovod::sparse {
namespace {

// The same as between the two members of a mesh (mesh/reduce_slices.cc), as the pieces of one partner alone fill the
// wire.
constexpr int64_t kPiecesOnWire = 4;
constexpr int64_t kTreePieceBytes = 3 * packets::kBytes;
constexpr int64_t kTreeAlignment = 64;  // elements

// What a message costs, as the number of bytes that could be sent meanwhile; and the largest array that is exchanged
// whole, whatever that saves. Both as measured for the full mesh (mesh/slices.cc).
constexpr int64_t kMessageBytes = 32 << 10;
constexpr int64_t kMostDoubledBytes = 256 << 10;

// How an array of `elements` is cut into pieces; both ends of an exchange agree.
struct Pieces {
  int64_t elements;
  int64_t each;  // elements of every piece but the last, which has the rest
  int64_t count;

  Pieces(int64_t elements, int64_t item)
      : elements(elements), each(kTreePieceBytes / item / kTreeAlignment * kTreeAlignment), count(0) {
    if (elements > 0) count = packets::chunk_count(elements * item, each * item);
  }
  int64_t most() const { return count < 2 ? elements : std::max(each, elements - (count - 1) * each); }
  Range piece(int64_t index, int64_t begin) const {
    if (index >= count) return {begin, begin};
    return {begin + index * each, begin + (index == count - 1 ? elements : (index + 1) * each)};
  }
};

}  // namespace

Tree::Tree(Mesh& mesh, std::vector<int> members, const Reduction& reduction)
    : mesh_(mesh),
      members_(std::move(members)),
      place_(static_cast<int>(std::find(members_.begin(), members_.end(), mesh.rank()) - members_.begin())),
      power_(static_cast<int>(std::bit_floor(members_.size()))),
      reduction_(reduction),
      item_(static_cast<int64_t>(size_of(reduction.dtype))) {}

// At distance 1 the lowest bit of the place decides between the halves of the whole array, so it is the highest of the
// part's number.
int Tree::part_of(int place) const {
  int part = 0;
  for (int bit = 1; bit < power_; bit *= 2) part = 2 * part + ((place & bit) != 0 ? 1 : 0);
  return part;
}

Status Tree::begin(const SpanList& array, const SpanList& sums, Range range) {
  mine_ = &array;
  sums_ = &sums;
  const Pieces pieces(range.size(), item_);
  // A part of the range may have a last piece that is longer than any of the whole.
  const int64_t longest = std::min(range.size(), pieces.each + pieces.each / 4);
  const int64_t bytes = std::min(pieces.count, kPiecesOnWire) * longest * item_;
  if (!is_folded() && bytes > scratch_bytes_) {
    scratch_.reset(new (std::nothrow) std::byte[static_cast<size_t>(bytes)]);
    if (!scratch_)
      return {Code::internal, error_code::out_of_memory, "There is not enough memory for a reduction's scratch space."};
    scratch_bytes_ = bytes;
  }
  // Each member's input is scaled and rounded before it is sent.
  if (reduction_.prescale == 1.0 || reduction_.dtype == DType::boolean) return {};
  array.visit(range.begin, range.end, [&](const std::byte* input, std::byte* output, int64_t count, int64_t) {
    kernels::scale(reduction_.dtype, output, input, static_cast<size_t>(count), reduction_.prescale);
  });
  mine_ = sums_;
  return {};
}

Status Tree::reduce_all(Range range) {
  if (range.size() == 0) return {};
  HVD_TRY(fold(range));
  if (is_small(range.size())) {
    HVD_TRY(double_up(range));
  } else {
    std::vector<int64_t> bounds;
    for (int64_t part = 0; part < power_; ++part) {
      bounds.push_back(range.begin + range.size() * part / power_ / kTreeAlignment * kTreeAlignment);
    }
    bounds.push_back(range.end);
    HVD_TRY(halve(bounds));
    HVD_TRY(gather(bounds));
  }
  const mesh::Slice all{sums_, range.begin, range.end};
  return unfold(all, all);
}

Status Tree::reduce_parts(std::span<const int64_t> bounds) {
  HVD_TRY(fold({bounds.front(), bounds.back()}));
  return halve(bounds);
}

// Doubling sends B in each of log2 p steps, halving and gathering 2 B (p - 1) / p in twice as many: doubling takes less
// time where the messages that it saves are worth more than the bytes that it adds.
bool Tree::is_small(int64_t elements) const {
  const int64_t bytes = elements * item_;
  const int64_t steps = std::bit_width(static_cast<unsigned>(power_)) - 1;
  if (bytes > kMostDoubledBytes) return false;
  return bytes * (steps * power_ - 2 * (power_ - 1)) <= steps * kMessageBytes * power_;
}

Status Tree::fold(Range range) {
  if (is_folded()) return exchange_and_reduce(place_ - power_, range, {range.begin, range.begin}, 1.0);
  return folds() ? exchange_and_reduce(place_ + power_, {range.begin, range.begin}, range, 1.0) : Status();
}

Status Tree::unfold(const mesh::Slice& mine, const mesh::Slice& theirs) {
  Transfer whole;
  if (is_folded()) {
    whole.peer = members_[static_cast<size_t>(place_ - power_)];
    theirs.list->outputs(theirs.begin, theirs.end, whole.pieces);
    return mesh_.exchange({}, {&whole, 1});
  }
  if (!folds()) return {};
  whole.peer = members_[static_cast<size_t>(place_ + power_)];
  mine.list->outputs(mine.begin, mine.end, whole.pieces);
  return mesh_.exchange({&whole, 1}, {});
}

Status Tree::double_up(Range range) {
  if (is_folded()) return {};
  for (int distance = 1; distance < power_; distance *= 2) {
    HVD_TRY(exchange_and_reduce(place_ ^ distance, range, range, postscale_at(distance)));
  }
  return {};
}

Status Tree::halve(std::span<const int64_t> bounds) {
  if (is_folded()) return {};
  size_t first = 0, last = bounds.size() - 1;
  for (int distance = 1; distance < power_; distance *= 2) {
    const size_t middle = (first + last) / 2;
    const Range lower{bounds[first], bounds[middle]}, upper{bounds[middle], bounds[last]};
    const bool keeps_lower = (place_ & distance) == 0;
    HVD_TRY(exchange_and_reduce(place_ ^ distance, keeps_lower ? upper : lower, keeps_lower ? lower : upper,
                                postscale_at(distance)));
    (keeps_lower ? last : first) = middle;
  }
  return {};
}

// Results of other members overwrite no input that is still needed: those members have received it before.
Status Tree::gather(std::span<const int64_t> bounds) {
  if (is_folded()) return {};
  auto first = static_cast<size_t>(part_of(place_));
  for (size_t width = 1; width < bounds.size() - 1; width *= 2) {
    const int distance = power_ / 2 / static_cast<int>(width);
    const size_t theirs = (place_ & distance) == 0 ? first + width : first - width;
    const int peer = members_[static_cast<size_t>(place_ ^ distance)];
    Transfer send{peer, {}}, receive{peer, {}};
    sums_->outputs(bounds[first], bounds[first + width], send.pieces);
    sums_->outputs(bounds[theirs], bounds[theirs + width], receive.pieces);
    HVD_TRY(mesh_.exchange({&send, 1}, {&receive, 1}));
    first = std::min(first, theirs);
  }
  return {};
}

// Sends this member's elements of one range to another member, and reduces its elements of another one, or of the same,
// with what comes from there.
Status Tree::exchange_and_reduce(int other, Range sent, Range reduced, double postscale) {
  const int peer = members_[static_cast<size_t>(other)];
  const Pieces to(sent.size(), item_), from(reduced.size(), item_);
  const int64_t count = std::max(to.count, from.count);
  std::array<Flight, kPiecesOnWire> flights;
  const auto arrived = [&](int64_t index) { return scratch_.get() + index % kPiecesOnWire * from.most() * item_; };
  const auto start = [&](int64_t index) {
    const Range out = to.piece(index, sent.begin), in = from.piece(index, reduced.begin);
    Transfer send{peer, {}}, receive{peer, {}};
    mine_->inputs(out.begin, out.end, send.pieces);
    if (in.size() > 0) receive.pieces.push_back({arrived(index), static_cast<size_t>(in.size() * item_)});
    // Both at the same time: the piece that is sent may be the one that is reduced next.
    return mesh_.start({&send, 1}, {&receive, 1}, flights[static_cast<size_t>(index % kPiecesOnWire)]);
  };
  for (int64_t index = 0; index < std::min(count, kPiecesOnWire); ++index) HVD_TRY(start(index));
  for (int64_t index = 0; index < count; ++index) {
    HVD_TRY(mesh_.finish(flights[static_cast<size_t>(index % kPiecesOnWire)]));
    reduce(other, from.piece(index, reduced.begin), arrived(index), postscale);
    if (index + kPiecesOnWire < count) HVD_TRY(start(index + kPiecesOnWire));
  }
  if (reduced.size() > 0) mine_ = sums_;
  return {};
}

void Tree::reduce(int other, Range piece, const std::byte* arrived, double postscale) {
  mine_->visit(piece.begin, piece.end, [&](const std::byte* input, std::byte* output, int64_t count, int64_t offset) {
    const std::byte* const theirs = arrived + offset * item_;
    const void* const lower_first[] = {other < place_ ? theirs : input, other < place_ ? input : theirs};
    kernels::reduce(reduction_.dtype, reduction_.op, output, lower_first, 2, static_cast<size_t>(count), postscale);
  });
}

}  // namespace horovod::sparse
