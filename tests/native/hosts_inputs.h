// The inputs of fuzz_hosts.cc: what they say, good ones, and how they become bad.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/host_channel.h"
#include "engine/order_log.h"
#include "fuzz.h"
#include "transport/segment.h"

namespace horovod::testing {

inline constexpr uint32_t kIds = 6;  // which every rank has arrived at

// Whose memory is read by whom, by the first byte of an input.
struct Setup {
  std::vector<int> host_of;  // empty: HostReader alone
  int tested, hostile;       // ranks
};
inline const Setup kSetups[] = {
    {{}, 0, 0},           {{0, 0, 1}, 0, 1},  // the first rank of the host, which is the sequencer, of two hosts
    {{0, 0, 1, 2}, 0, 1},                     // of three
    {{0, 1, 1}, 1, 2},                        // the first rank, which is not
    {{0, 0, 1}, 1, 0},                        // another rank
};
inline constexpr int kSetupCount = static_cast<int>(std::size(kSetups));

enum class Step : uint8_t {
  write,   // u16 length, bytes: goes into the ring, filled up to 16, and `written` tells of it
  poll,    // the rank under test reads what there is, arrives again at what it ran, and the other hosts go on
  jump,    // u64: `written`
  patch,   // u32 offset, u8 length, bytes: what is in the ring changes, read or not
  word,    // u8 which, u64: another word of the memory
  end,     // u8 state, u16 length, bytes: the writer ends with this sentence
  frame,   // u8 kind, u8 sender, u8 count, u32 ids, u16 length, bytes: comes through the mesh
  regret,  // u32 id: the rank under test wants its arrival back
  race,    // u16 length, twice so many bytes: the ring changes between the two while it is read
};
inline constexpr int kSteps = 9;

#ifndef HOROVOD_LIBFUZZER

// -- good inputs ------------------------------------------------------------------------------------------------------

template <typename T>
void append(std::string& text, T value) {
  text.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

inline std::string step(Step kind) { return std::string(1, static_cast<char>(kind)); }

inline std::string message(HostMessage::Kind kind, uint32_t id, uint32_t member, std::string_view payload) {
  std::string bytes;
  append(bytes, HostMessage{kind, id, member, static_cast<uint32_t>(payload.size())});
  bytes.append(payload);
  return bytes;
}

inline std::string write(std::string_view bytes) {
  std::string made = step(Step::write);
  append(made, static_cast<uint16_t>(bytes.size()));
  made.append(bytes);
  return made;
}
inline std::string write(HostMessage::Kind kind, uint32_t id, uint32_t member = 0, std::string_view payload = {}) {
  return write(message(kind, id, member, payload));
}

// A message that is nothing but room: with its header so many bytes of the ring.
inline std::string skip(uint32_t bytes) {
  std::string made;
  append(made, HostMessage{HostMessage::skip, 0, 0, bytes - static_cast<uint32_t>(sizeof(HostMessage))});
  return made;
}

inline std::string floats(TensorId id) { return std::string(3 * (id + 1) * sizeof(float), '\1'); }

inline std::string ids(std::initializer_list<TensorId> list) {
  std::string bytes;
  for (const TensorId id : list) append(bytes, id);
  return bytes;
}

inline std::string race_step(std::string one, std::string other) {
  const size_t size = std::max(one.size(), other.size());
  one.resize(size);
  other.resize(size);
  std::string made = step(Step::race);
  append(made, static_cast<uint16_t>(size));
  return made + one + other;
}

inline std::string end(MemberState state, std::string_view sentence) {
  std::string made = step(Step::end);
  append(made, static_cast<uint8_t>(state));
  append(made, static_cast<uint16_t>(sentence.size()));
  return made.append(sentence);
}

inline std::string regret(TensorId id) {
  std::string made = step(Step::regret);
  append(made, id);
  return made;
}

// Steps of a conversation, without the first byte of an input.
using Steps = std::vector<std::string>;

// What another rank of the host says to the first one. The root of the broadcast is the last rank.
inline Steps to_first(bool is_root) {
  Steps steps;
  for (TensorId id = 0; id < 2; ++id) steps.push_back(write(HostMessage::plain, id, 1));
  steps.push_back(step(Step::poll));
  steps.push_back(write(HostMessage::brings, 2, 1, is_root ? floats(2) : ""));
  for (TensorId id = 3; id < kIds; ++id) steps.push_back(write(HostMessage::brings, id, 1, floats(id)));
  steps.push_back(write(HostMessage::withdraw, 4, 1));
  steps.push_back(step(Step::poll));
  steps.push_back(regret(3));
  steps.push_back(step(Step::poll));
  steps.push_back(end(MemberState::left, "Rank 1 has shut down."));
  return steps;
}

// What the first rank of a host says to another one.
inline Steps from_first() {
  return {write(HostMessage::batch, 0, 0, ids({0, 1})),
          step(Step::poll),
          write(HostMessage::done, 3, 0, floats(3)),
          write(HostMessage::done, 2, 0, floats(2)),
          step(Step::poll),
          regret(4),
          write(HostMessage::withdrawn, 4, 1),
          write(HostMessage::withdrawn, 5, 7),
          step(Step::poll),
          write(HostMessage::closed, 0, 0, "Rank 2 has shut down."),
          end(MemberState::left, "Rank 0 has shut down.")};
}

inline std::string jump(uint64_t written) {
  std::string made = step(Step::jump);
  append(made, written);
  return made;
}

// So much room first that what comes then is at the end of the ring, and goes on at its beginning.
inline Steps near_the_end(Steps steps, uint32_t before) {
  constexpr uint64_t kEnd = HostMemory::kBytes;
  const auto room = static_cast<uint32_t>(kEnd - before);
  const Steps first = {write(skip(room)), jump(room), step(Step::poll), write(skip(before)), jump(kEnd)};
  steps.insert(steps.begin(), first.begin(), first.end());
  return steps;
}

struct Seed {
  int setup;
  Steps steps;
  std::string input() const {
    std::string made(1, static_cast<char>(setup));
    for (const std::string& one : steps) made += one;
    return made;
  }
};

inline std::vector<Seed> good_inputs() {
  std::vector<Seed> seeds;
  for (const uint32_t before : {0u, 16u, 64u}) {
    for (int setup = 0; setup < kSetupCount; ++setup) {
      const Setup& roles = kSetups[setup];
      const bool first = roles.tested < roles.hostile;
      Steps steps = first ? to_first(roles.hostile == 2) : from_first();
      seeds.push_back({setup, before > 0 ? near_the_end(std::move(steps), before) : std::move(steps)});
    }
  }
  return seeds;
}

// -- bad ones ---------------------------------------------------------------------------------------------------------

inline std::string made_up_step(std::mt19937& random) {
  const auto some_id = [&] { return static_cast<TensorId>(random() % 16 == 0 ? random() : random() % (kIds + 1)); };
  const auto noise = [&](size_t most) {
    std::string bytes(random() % most, '\0');
    for (char& byte : bytes) byte = random() % 2 ? static_cast<char>(random()) : static_cast<char>(random() % 8);
    return bytes;
  };
  const auto kind = static_cast<Step>(random() % kSteps);
  std::string made = step(kind);
  switch (kind) {
    case Step::write: {
      const auto of = static_cast<HostMessage::Kind>(random() % 9);  // with one that does not exist
      const TensorId id = some_id();
      const std::string payload = of == HostMessage::batch    ? ids({some_id(), some_id()})
                                  : random() % 2 && id < kIds ? floats(id)
                                                              : noise(64);
      return write(of, id, random() % 3, payload);
    }
    case Step::jump:
      append(made, uint64_t{random() % 1024 * 16});
      break;
    case Step::patch:
      append(made, static_cast<uint32_t>(random() % 512));
      append(made, static_cast<uint8_t>(16));
      made += noise(17);
      break;
    case Step::word:
      append(made, static_cast<uint8_t>(random()));
      append(made, uint64_t{random() % 4});
      break;
    case Step::end:
      return end(static_cast<MemberState>(random() % 4), std::string(random() % 4096, 'x'));
    case Step::frame: {
      append(made, static_cast<uint8_t>(1 + random() % 9));
      append(made, static_cast<uint8_t>(random()));
      append(made, static_cast<uint8_t>(2));
      append(made, some_id());
      append(made, some_id());
      const std::string text = noise(64);
      append(made, static_cast<uint16_t>(text.size()));
      made += text;
      break;
    }
    case Step::regret:
      append(made, some_id());
      break;
    case Step::race:
      return race_step(message(HostMessage::brings, some_id(), 1, noise(64)),
                       message(HostMessage::done, some_id(), 1, noise(64)));
    default:
      break;
  }
  return made;
}

inline std::string mutate(const std::vector<Seed>& seeds, std::mt19937& random) {
  Seed spoilt = seeds[random() % seeds.size()];
  if (random() % 8 == 0) spoilt.setup = static_cast<int>(random() % kSetupCount);
  spoil(spoilt.steps, random, {3, 19}, [&] { return made_up_step(random); });  // a head: that of a message
  std::string input = spoilt.input();
  if (random() % 4 == 0) input.resize(1 + random() % input.size());
  return input;
}

#endif  // HOROVOD_LIBFUZZER

}  // namespace horovod::testing
