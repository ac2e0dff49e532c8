#include "collectives/sparse/parcels.h"

#include <algorithm>
#include <bit>

namespace horovod::sparse {
namespace {

// How far a parcel has travelled after the step of this distance, and how far it still has to go.
constexpr int way_made(int number, int distance) { return number & (2 * distance - 1); }
constexpr int way_left(int number, int distance) { return number & ~(2 * distance - 1); }

// The step that passes on a parcel which came in the step of this distance and has not reached its receiver.
constexpr int next_step(int number, int distance) {
  return std::countr_zero(static_cast<unsigned>(way_left(number, distance)));
}

}  // namespace

Parcels::Parcels(Mesh& mesh, const AnnouncementFormat& format)
    : sources(mesh.size()),
      goals(mesh.size()),
      mesh_(mesh),
      format_(format),
      n_(mesh.size()),
      announced_(format.words() * static_cast<size_t>(mesh.size())) {}

std::vector<int> Parcels::passed_at(int distance) const {
  std::vector<int> numbers;
  for (int number = distance; number < n_; ++number) {
    if (number & distance) numbers.push_back(number);
  }
  return numbers;
}

Status Parcels::step(int distance, Transfer& send, Transfer& receive) {
  send.peer = (mesh_.rank() + distance) % n_;
  receive.peer = (mesh_.rank() + n_ - distance) % n_;
  return mesh_.exchange({&send, 1}, {&receive, 1});
}

Status Parcels::exchange_announcements() {
  const size_t words = format_.words();
  std::vector<int64_t> arrived(announced_.size());
  for (int distance = 1; distance < n_; distance *= 2) {
    const std::vector<int> numbers = passed_at(distance);
    Transfer send, receive;
    for (const int number : numbers) send.pieces.push_back({announcement(number), format_.bytes()});
    receive.pieces.push_back({arrived.data(), format_.bytes() * numbers.size()});
    HVD_TRY(step(distance, send, receive));
    std::vector<uint64_t>& bytes = bytes_in_.emplace_back(static_cast<size_t>(n_));
    const int64_t* from = arrived.data();
    for (const int number : numbers) {
      HVD_TRY(format_.check(from, (mesh_.rank() + n_ - way_made(number, distance)) % n_));
      bytes[number] = format_.has_data(from) ? 0 : format_.bytes_of_rows(from);
      std::copy(from, from + words, announcement(number));
      from += words;
    }
  }
  return {};
}

Status Parcels::exchange_rows() {
  relays_.resize(bytes_in_.size());
  size_t index = 0;
  for (int distance = 1; distance < n_; distance *= 2, ++index) {
    const std::vector<int> numbers = passed_at(distance);
    const std::vector<uint64_t>& bytes = bytes_in_[index];
    Transfer send, receive;
    for (const int number : numbers) {
      send.pieces.insert(send.pieces.end(), sources[number].begin(), sources[number].end());
    }
    HVD_TRY(make_room(distance, bytes));
    for (const int number : numbers) {
      const std::vector<iovec>& to = way_left(number, distance) == 0 ? goals[number] : sources[number];
      if (bytes[number] > 0) receive.pieces.insert(receive.pieces.end(), to.begin(), to.end());
    }
    HVD_TRY(step(distance, send, receive));
    relays_[index].clear();
  }
  return {};
}

// Points `sources` to memory for the parcels that come and are not for this member. Those that are passed on together
// lie in the same piece, so that each piece is freed as a whole.
Status Parcels::make_room(int distance, const std::vector<uint64_t>& bytes) {
  std::vector<uint64_t> needed(relays_.size());
  for (const int number : passed_at(distance)) {
    if (way_left(number, distance) != 0) needed[next_step(number, distance)] += bytes[number];
  }
  std::vector<std::byte*> unused(relays_.size());
  for (size_t i = 0; i < needed.size(); ++i) {
    if (needed[i] == 0) continue;
    OutputBuffer& relay = relays_[i].emplace_back();
    if (!relay.allocate(needed[i])) {
      return {Code::internal, error_code::out_of_memory,
              "There is not enough memory for the " + std::to_string(needed[i]) +
                  " bytes of an alltoall that this rank passes on for others."};
    }
    unused[i] = relay.data.get();
  }
  for (const int number : passed_at(distance)) {
    if (way_left(number, distance) == 0) continue;
    sources[number].clear();
    if (bytes[number] == 0) continue;
    std::byte*& at = unused[next_step(number, distance)];
    sources[number].push_back({at, bytes[number]});
    at += bytes[number];
  }
  return {};
}

}  // namespace horovod::sparse
