// The inputs of fuzz_mesh.cc: what they say, and how good ones become bad.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "fuzz.h"
#include "transport/mesh_frame.h"

namespace horovod::testing {

inline constexpr uint64_t kEpoch = 7;
inline constexpr size_t kInputBytes = 3;         // of an input, in front of the stream: what Setup says
inline constexpr size_t kStreamBytes = 100'000;  // fits into a socket's buffer, so that nobody has to write meanwhile

// log_of_hosts, log_with_others: the log's members are hosts. The peer speaks for one of them, or has no say in the log
// (which takes a third rank, and the sequencer to be under test). Those that begin with sparse run over a sparse mesh
// of four or three members, in which a rank passes on what others have said; there the input is what all peers send.
enum class Action : int {
  log,
  log_withdraw,
  log_of_hosts,
  log_with_others,
  exchange,
  allreduce,
  broadcast,
  allgather,
  alltoall,
  reducescatter,
  sparse_log,
  sparse_allreduce,
  sparse_allgather,
  sparse_alltoall,
  sparse_reducescatter
};
inline constexpr int kActions = 15;
constexpr bool is_log(Action action) { return action < Action::exchange || action == Action::sparse_log; }
constexpr bool is_sparse(Action action) { return action >= Action::sparse_log; }

// What the first bytes of an input say about the rank under test.
struct Setup {
  int connections;  // to each peer
  int size;
  Action action;
  int rank;        // 0 is the order log's sequencer
  int ends;        // in a sparse mesh: the peer whose connections end, if there is such a one
  uint8_t early;   // of 256: how much of what a peer says comes before the action begins
  uint8_t second;  // and how much of it, from the end, goes to the second connection

  static Setup of(const uint8_t* data) {
    Setup setup;
    setup.connections = (data[0] & 2) ? 2 : 1;
    setup.action = static_cast<Action>((data[0] >> 3) % kActions);
    setup.rank = data[0] & 1;
    setup.size = (data[0] & 4) ? 3 : 2;  // with 3, a silent peer is there too
    if (is_sparse(setup.action)) {
      setup.size = (data[0] & 4) ? 3 : 4;
      // The last member is folded or relays most; of a log's tree of four, the one before stands in the middle.
      if (setup.rank == 1) setup.rank = setup.size - (setup.action == Action::sparse_log ? 2 : 1);
    }
    setup.ends = data[2] % 8;
    setup.early = data[1];
    setup.second = setup.connections == 2 ? data[2] : 0;
    return setup;
  }
  int hostile() const { return is_sparse(action) ? -1 : 1 - rank; }  // the only one that says something
};

// What each peer says. In a sparse mesh the parts of the peers stand one after the other, each behind its length.
inline std::vector<std::string_view> parts_of(const Setup& setup, std::string_view stream) {
  std::vector<std::string_view> parts(static_cast<size_t>(setup.size));
  if (!is_sparse(setup.action)) {
    parts[static_cast<size_t>(setup.hostile())] = stream.substr(0, kStreamBytes);
    return parts;
  }
  for (int peer = 0; peer < setup.size; ++peer) {
    uint32_t length = 0;
    if (peer == setup.rank || stream.size() < sizeof(length)) continue;
    std::memcpy(&length, stream.data(), sizeof(length));
    stream.remove_prefix(sizeof(length));
    parts[static_cast<size_t>(peer)] = stream.substr(0, std::min<size_t>(length, kStreamBytes));
    stream.remove_prefix(parts[static_cast<size_t>(peer)].size());
  }
  return parts;
}

inline void append_part(std::string& stream, std::string_view part) {
  const auto length = static_cast<uint32_t>(part.size());
  stream.append(reinterpret_cast<const char*>(&length), sizeof(length));
  stream.append(part);
}

inline std::vector<std::string> frames_of(const std::string& stream) {
  std::vector<std::string> frames;
  for (size_t at = 0; at < stream.size();) {
    wire::FrameHeader header;
    size_t size = stream.size() - at;
    if (size >= sizeof(header)) {
      std::memcpy(&header, stream.data() + at, sizeof(header));
      size = std::min(size, sizeof(header) + static_cast<size_t>(header.length));
    }
    frames.push_back(stream.substr(at, size));
    at += size;
  }
  return frames;
}

inline std::string made_up_frame(std::mt19937& random, int sender) {
  wire::FrameHeader header;
  header.kind = static_cast<uint8_t>(random() % 12);  // with two that do not exist
  header.sender = static_cast<uint16_t>(sender);
  header.epoch = kEpoch;
  header.sequence = random() % 3;
  std::string payload(random() % 5 == 0 ? 1000 + random() % 8000 : random() % 64, '\0');
  for (char& byte : payload) byte = random() % 2 ? static_cast<char>(random()) : static_cast<char>(random() % 8);
  if (header.kind != 0 && payload.size() >= 4 && random() % 4 > 0) {  // few ids, then records that may make sense
    const uint32_t count = random() % std::max<size_t>(1, std::min<size_t>(payload.size() / 4, 6));
    std::memcpy(payload.data(), &count, sizeof(count));
    for (uint32_t i = 0; i < count; ++i) {
      const uint32_t id = random() % 8;
      std::memcpy(payload.data() + 4 + 4 * i, &id, sizeof(id));
    }
  }
  header.length = payload.size();
  std::string frame(reinterpret_cast<const char*>(&header), sizeof(header));
  return frame + payload;
}

// In front of the text of a frame that goes along the log's tree there is a stamp.
inline void change_stamp(std::string& frame, std::mt19937& random) {
  uint32_t count = 0;
  const size_t ids = sizeof(wire::FrameHeader) + sizeof(count);
  if (frame.size() < ids || frame[4] == 0) return;
  std::memcpy(&count, frame.data() + sizeof(wire::FrameHeader), sizeof(count));
  const uint32_t stamp = random() % 4 > 0 ? random() % 5 : random();
  if (count > 64 || frame.size() < ids + sizeof(uint32_t) * count + sizeof(stamp)) return;
  std::memcpy(frame.data() + ids + sizeof(uint32_t) * count, &stamp, sizeof(stamp));
}

// What a member announces of its rows (sparse/announcement.h), such that bytes and rows fit together; of one tensor, as
// all here are.
inline void change_announcement(std::string& frame, std::mt19937& random) {
  constexpr size_t kAt = sizeof(wire::FrameHeader);
  constexpr int64_t kRowBytes = 12;
  if (frame.size() < kAt + 2 * sizeof(int64_t) || frame[4] != 0) return;
  static const int64_t rows[] = {0, 1, 80, 86, 100'000, int64_t{1} << 31, int64_t{1} << 40, int64_t{1} << 60, -1};
  const int64_t count = rows[random() % std::size(rows)];
  const int64_t words[] = {static_cast<int64_t>(static_cast<uint64_t>(count) * kRowBytes), count};
  std::memcpy(frame.data() + kAt, words, sizeof(words));
}

inline std::string mutate_part(std::string_view part, int sender, std::mt19937& random) {
  std::vector<std::string> frames = frames_of(std::string(part));
  // A head: the header's length, and the beginning of the payload.
  spoil(frames, random, {24, 40}, [&] { return made_up_frame(random, sender); });
  for (std::string& frame : frames) {
    if (random() % 16 == 0) change_stamp(frame, random);
    if (random() % 32 == 0) change_announcement(frame, random);
  }
  if (random() % 2 == 0) {  // control frames count, so that what was moved or made up is looked at
    uint64_t sequence = 0;
    for (std::string& frame : frames) {
      if (frame.size() < sizeof(wire::FrameHeader) || frame[4] == 0) continue;
      std::memcpy(frame.data() + 16, &sequence, sizeof(sequence));
      ++sequence;
    }
  }
  std::string changed;
  for (const std::string& frame : frames) changed += frame;
  if (random() % 4 == 0) changed.resize(random() % (changed.size() + 1));
  return changed;
}

inline std::string mutate(const std::vector<std::string>& seeds, std::mt19937& random) {
  const std::string& seed = seeds[random() % seeds.size()];
  std::string input = seed.substr(0, kInputBytes);
  const std::string_view stream = std::string_view(seed).substr(kInputBytes);
  const auto setup_of = [](const std::string& bytes) {
    return Setup::of(reinterpret_cast<const uint8_t*>(bytes.data()));
  };
  const Setup recorded = setup_of(input);
  if (random() % 8 == 0) input[0] = static_cast<char>(random());
  input[1] = static_cast<char>(random());
  if (random() % 8 == 0) input[0] = static_cast<char>(input[0] | 2);
  if (random() % 8 == 0) input[0] = static_cast<char>(input[0] | 4);
  input[2] = static_cast<char>(random());
  const std::vector<std::string_view> parts = parts_of(recorded, stream);
  const Setup setup = setup_of(input);
  if (!is_sparse(setup.action)) {
    const auto longest =
        std::max_element(parts.begin(), parts.end(), [](const auto& a, const auto& b) { return a.size() < b.size(); });
    return input + mutate_part(*longest, setup.hostile(), random);
  }
  // What some of the peers say, one at least, is changed; the others say what they should.
  const auto liar = static_cast<int>(random() % static_cast<unsigned>(setup.size));
  for (int peer = 0; peer < setup.size; ++peer) {
    if (peer == setup.rank) continue;
    const std::string_view part = static_cast<size_t>(peer) < parts.size() ? parts[peer] : std::string_view();
    const bool lies = peer == liar || random() % 4 == 0;
    append_part(input, lies ? mutate_part(part, peer, random) : std::string(part));
  }
  return input;
}

}  // namespace horovod::testing
