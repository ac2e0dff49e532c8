// Fuzz target for what a rank reads that another rank of its host has written into shared memory: the messages of
// engine/host_channel.h, their cursors and flags, and the sentence with which a rank ends. They are read by HostReader
// alone, by the log of a host's first rank, and by that of another one; both logs are real, with a region, a mesh, and
// good logs on the other hosts, from which frames with any content may come in between. Whatever is there, every call
// must end with a Status that has a sentence, and a log must report only what this rank has arrived at, once.
//
// The input is a list of steps, see Step. How the program is run is in fuzz.h.
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "check.h"
#include "collectives/mesh/eager.h"
#include "fuzz.h"
#include "fuzz_work.h"
#include "hosts_world.h"

using namespace horovod;
using namespace horovod::testing;

extern "C" void __asan_poison_memory_region(const volatile void*, size_t) __attribute__((weak));
extern "C" void __asan_unpoison_memory_region(const volatile void*, size_t) __attribute__((weak));

namespace {

#ifdef __SANITIZE_THREAD__
constexpr bool kRaces = false;  // it would report what Step::race does on purpose
#else
constexpr bool kRaces = true;
#endif

constexpr uint32_t kIds = 6;  // which every rank has arrived at

// Whose memory is read by whom, by the first byte of an input.
struct Setup {
  std::vector<int> host_of;  // empty: HostReader alone
  int tested, hostile;       // ranks
};
const Setup kSetups[] = {
    {{}, 0, 0},           {{0, 0, 1}, 0, 1},  // the first rank of the host, which is the sequencer, of two hosts
    {{0, 0, 1, 2}, 0, 1},                     // of three
    {{0, 1, 1}, 1, 2},                        // the first rank, which is not
    {{0, 0, 1}, 1, 0},                        // another rank
};
constexpr int kSetupCount = static_cast<int>(std::size(kSetups));

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
constexpr int kSteps = 9;

// Takes an input apart; what is missing at its end is zero.
struct Script {
  const uint8_t* at;
  const uint8_t* end;

  template <typename T>
  T number() {
    T value{};
    const size_t have = std::min(sizeof(T), left());
    std::memcpy(&value, at, have);
    at += have;
    return value;
  }
  std::string_view bytes(size_t size) {
    size = std::min(size, left());
    const std::string_view taken(reinterpret_cast<const char*>(at), size);
    at += size;
    return taken;
  }
  size_t left() const { return static_cast<size_t>(end - at); }
};

// The side that writes whatever it likes.
struct Hostile {
  HostMemory& memory;
  uint64_t cursor = 0;

  void put(uint64_t at, std::string_view bytes) {
    for (size_t i = 0; i < bytes.size(); ++i) {
      memory.ring[(at + i) % HostMemory::kBytes] = static_cast<std::byte>(bytes[i]);
    }
  }
  void write(std::string_view bytes) {
    put(cursor, bytes);
    publish(bytes.size());
  }
  void publish(size_t bytes) {
    cursor += (bytes + 15) / 16 * 16;
    memory.written.value.store(cursor);
  }
  void set(int which, uint64_t value) {
    HostMemory::Word* const words[] = {&memory.starved, &memory.taken, &memory.heard, &memory.asleep};
    words[which % 4]->value.store(value);
  }
};

// Nobody has any business between two parts of a shared area: the sanitizer, if there is one, says who goes there.
class Fence {
 public:
  Fence(const void* begin, const void* end)
      : begin_(begin),
        bytes_(static_cast<size_t>(static_cast<const std::byte*>(end) - static_cast<const std::byte*>(begin))) {
    if (__asan_poison_memory_region) __asan_poison_memory_region(begin_, bytes_);
  }
  ~Fence() {
    if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(begin_, bytes_);
  }
  Fence(const Fence&) = delete;
  Fence& operator=(const Fence&) = delete;

 private:
  const void* const begin_;
  const size_t bytes_;
};

// What is under test.
struct Reading {
  virtual ~Reading() = default;
  virtual Status poll() = 0;
  virtual void end(uint8_t state, std::string_view sentence) = 0;
  virtual Status frame(ControlKind kind, int sender, const std::vector<uint32_t>& ids, std::string_view text) = 0;
  virtual Status regret(TensorId id) = 0;
  virtual HostMemory& hostile() = 0;

  int events = 0;  // that were reported
};

struct AloneReading final : Reading {
  // On the heap, where the sanitizer sees what is read behind the ring.
  std::unique_ptr<HostMemory> memory = std::make_unique<HostMemory>();
  std::atomic<uint64_t> cursor{0};
  HostReader reader{*memory, cursor, "rank 1 on host fuzz"};

  Status poll() override {
    HostMessage message;
    std::string_view payload;
    for (;;) {
      bool found = false;
      HVD_TRY(reader.peek(message, payload, found));
      if (!found) return {};
      const auto* const begin = reinterpret_cast<const std::byte*>(payload.data());
      CHECK(begin >= memory->ring && begin + payload.size() <= memory->ring + HostMemory::kBytes);
      CHECK(message.kind != HostMessage::skip && message.length == payload.size());
      (void)std::string(payload);
      const uint64_t before = cursor.load();
      (void)reader.consume();
      CHECK(cursor.load() > before && cursor.load() % 16 == 0);
      ++events;
    }
  }
  void end(uint8_t, std::string_view) override {}
  Status frame(ControlKind, int, const std::vector<uint32_t>&, std::string_view) override { return {}; }
  Status regret(TensorId) override { return {}; }
  HostMemory& hostile() override { return *memory; }
};

// One rank's log and what it has arrived at.
struct Driven {
  std::unique_ptr<OrderLog> log;
  Work work;
  std::set<TensorId> here, regretted;
  int again = 8;  // how many more times it arrives at something
  int events = 0;

  // Two plain ones, one from the last rank for all, the others bring what is to be summed.
  Status arrive(TensorId id, int size) {
    CHECK(here.insert(id).second);
    if (id < 2) return log->arrive(id);
    return log->arrive_with(id, *work.add(id == 2 ? OpType::broadcast : OpType::allreduce, 3 * (id + 1), size - 1));
  }
  Status poll(int size) {
    for (int idle = 0; idle < 2;) {
      LogEvent event;
      HVD_TRY(log->poll(event));
      if (event.kind == LogEvent::none) {
        ++idle;
        HVD_TRY(log->wait(100));
        continue;
      }
      ++events;
      CHECK(event.kind == LogEvent::batch || event.ids.size() == 1);
      for (const TensorId id : event.ids) {
        CHECK(here.erase(id) == 1, "the log reports id %u, which was not arrived at", id);
        regretted.erase(id);
      }
      for (const TensorId id : event.ids) {
        if (--again > 0) HVD_TRY(arrive(id, size));
      }
    }
    return {};
  }
};

struct LogReading final : Reading {
  const Setup& setup;
  HostsWorld world;
  Driven tested;
  std::vector<Driven> others;  // the first ranks of the other hosts
  Segment& segment;            // the hostile rank's
  const Fence after_header{&segment.header() + 1, segment.data() + HostsWorld::kHeader};
  const Fence after_ring{&hostile() + 1, reinterpret_cast<std::byte*>(&hostile()) + HostsWorld::kLog};

  explicit LogReading(const Setup& setup)
      : setup(setup), world(setup.host_of, fuzz_config(), Wire::pair), segment(*world.areas[setup.hostile]) {
    tested.log = world.log(setup.tested);
    for (int host = 0; host < world.hosts.count(); ++host) {
      if (host == world.hosts.host(setup.tested)) continue;
      others.emplace_back().log = world.log(world.hosts.leader(host));
    }
    for (TensorId id = 0; id < kIds; ++id) {
      CHECK_OK(tested.arrive(id, world.size()));
      for (Driven& other : others) CHECK_OK(other.arrive(id, world.size()));
    }
  }

  Status poll() override {
    for (Driven& other : others) {
      if (other.log && !other.poll(world.size()).ok()) other.log.reset();
    }
    Status status = tested.poll(world.size());
    events = tested.events;
    return status;
  }
  void end(uint8_t state, std::string_view sentence) override {
    SegmentHeader& header = segment.header();
    std::memcpy(header.cause, sentence.data(), std::min(sentence.size(), sizeof(header.cause)));
    header.state.store(state);
  }
  Status frame(ControlKind kind, int sender, const std::vector<uint32_t>& ids, std::string_view text) override {
    sender %= world.size();
    if (sender == setup.tested) return {};
    (void)world[sender].send_control(setup.tested, kind, ids, text);  // which may have ended by now
    return {};
  }
  Status regret(TensorId id) override {
    if (tested.here.count(id) == 0 || !tested.regretted.insert(id).second) return {};
    return tested.log->withdraw(id);
  }
  HostMemory& hostile() override {
    Region& region = *world.regions[setup.tested];
    return *reinterpret_cast<HostMemory*>(region.log(region.rank() == 0 ? 1 : 0));
  }
};

// The ring holds now one, now the other, while it is read. Which of them is found is chance; all else is not.
Status race(Reading& reading, Hostile& hostile, std::string_view one, std::string_view other) {
  const size_t room = HostMemory::kBytes - hostile.cursor % HostMemory::kBytes;
  if (!kRaces || one.size() != other.size() || one.empty() || one.size() > room) return {};
  std::byte* const to = hostile.memory.ring + hostile.cursor % HostMemory::kBytes;
  std::atomic<uint32_t> turns{0};
  std::atomic<bool> over{false};
  std::thread writer([&] {
    while (!over.load()) {
      std::memcpy(to, one.data(), one.size());
      std::memcpy(to, other.data(), other.size());
      ++turns;
    }
  });
  while (turns.load() < 2) std::this_thread::yield();
  hostile.publish(one.size());
  Status status = reading.poll();
  over.store(true);
  writer.join();
  return status;
}

Status take_step(Reading& reading, Hostile& hostile, Script& script) {
  switch (static_cast<Step>(script.number<uint8_t>() % kSteps)) {
    case Step::write:
      hostile.write(script.bytes(script.number<uint16_t>()));
      return {};
    case Step::poll:
      return reading.poll();
    case Step::jump:
      hostile.cursor = script.number<uint64_t>();
      hostile.memory.written.value.store(hostile.cursor);
      return {};
    case Step::patch: {
      const auto offset = script.number<uint32_t>();
      hostile.put(offset, script.bytes(script.number<uint8_t>()));
      return {};
    }
    case Step::word: {
      const auto which = script.number<uint8_t>();
      hostile.set(which, script.number<uint64_t>());
      return {};
    }
    case Step::end: {
      const auto state = script.number<uint8_t>();
      reading.end(state, script.bytes(script.number<uint16_t>()));
      return {};
    }
    case Step::frame: {
      const auto kind = static_cast<ControlKind>(script.number<uint8_t>() % 12);
      const int sender = script.number<uint8_t>();
      std::vector<uint32_t> ids(script.number<uint8_t>());
      for (uint32_t& id : ids) id = script.number<uint32_t>();
      return reading.frame(kind, sender, ids, script.bytes(script.number<uint16_t>()));
    }
    case Step::regret:
      return reading.regret(script.number<uint32_t>());
    case Step::race: {
      const size_t size = script.number<uint16_t>();
      const std::string_view one = script.bytes(size);
      return race(reading, hostile, one, script.bytes(size));
    }
  }
  return {};
}

struct Outcome {
  Status status;
  int events = 0;
};

Outcome run_input(const uint8_t* data, size_t size) {
  if (size == 0) return {};
  const Setup& setup = kSetups[data[0] % kSetupCount];
  std::unique_ptr<Reading> reading;
  if (setup.host_of.empty()) {
    reading = std::make_unique<AloneReading>();
  } else {
    reading = std::make_unique<LogReading>(setup);
  }
  Hostile hostile{reading->hostile()};
  Script script{data + 1, data + size};
  Status status;
  while (status.ok() && script.left() > 0) status = take_step(*reading, hostile, script);
  if (status.ok()) status = reading->poll();
  CHECK(status.ok() || !status.message().empty(), "a failure without a sentence");
  CHECK(status.message().size() < 8192, "a sentence of %zu bytes", status.message().size());
  return {status, reading->events};
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  (void)run_input(data, size);
  return 0;
}

#ifndef HOROVOD_LIBFUZZER

namespace {

// -- good inputs ------------------------------------------------------------------------------------------------------

template <typename T>
void append(std::string& text, T value) {
  text.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

std::string step(Step kind) { return std::string(1, static_cast<char>(kind)); }

std::string message(HostMessage::Kind kind, uint32_t id, uint32_t member, std::string_view payload) {
  std::string bytes;
  append(bytes, HostMessage{kind, id, member, static_cast<uint32_t>(payload.size())});
  bytes.append(payload);
  return bytes;
}

std::string write(std::string_view bytes) {
  std::string made = step(Step::write);
  append(made, static_cast<uint16_t>(bytes.size()));
  made.append(bytes);
  return made;
}
std::string write(HostMessage::Kind kind, uint32_t id, uint32_t member = 0, std::string_view payload = {}) {
  return write(message(kind, id, member, payload));
}

// A message that is nothing but room: with its header so many bytes of the ring.
std::string skip(uint32_t bytes) {
  std::string made;
  append(made, HostMessage{HostMessage::skip, 0, 0, bytes - static_cast<uint32_t>(sizeof(HostMessage))});
  return made;
}

std::string floats(TensorId id) { return std::string(3 * (id + 1) * sizeof(float), '\1'); }

std::string ids(std::initializer_list<TensorId> list) {
  std::string bytes;
  for (const TensorId id : list) append(bytes, id);
  return bytes;
}

std::string race_step(std::string one, std::string other) {
  const size_t size = std::max(one.size(), other.size());
  one.resize(size);
  other.resize(size);
  std::string made = step(Step::race);
  append(made, static_cast<uint16_t>(size));
  return made + one + other;
}

std::string end(MemberState state, std::string_view sentence) {
  std::string made = step(Step::end);
  append(made, static_cast<uint8_t>(state));
  append(made, static_cast<uint16_t>(sentence.size()));
  return made.append(sentence);
}

std::string regret(TensorId id) {
  std::string made = step(Step::regret);
  append(made, id);
  return made;
}

// Steps of a conversation, without the first byte of an input.
using Steps = std::vector<std::string>;

// What another rank of the host says to the first one. The root of the broadcast is the last rank.
Steps to_first(bool is_root) {
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
Steps from_first() {
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

std::string jump(uint64_t written) {
  std::string made = step(Step::jump);
  append(made, written);
  return made;
}

// So much room first that what comes then is at the end of the ring, and goes on at its beginning.
Steps near_the_end(Steps steps, uint32_t before) {
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

std::vector<Seed> good_inputs() {
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

std::string made_up_step(std::mt19937& random) {
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

std::string mutate(const std::vector<Seed>& seeds, std::mt19937& random) {
  Seed spoilt = seeds[random() % seeds.size()];
  if (random() % 8 == 0) spoilt.setup = static_cast<int>(random() % kSetupCount);
  spoil(spoilt.steps, random, {3, 19}, [&] { return made_up_step(random); });  // a head: that of a message
  std::string input = spoilt.input();
  if (random() % 4 == 0) input.resize(1 + random() % input.size());
  return input;
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<Seed> seeds = good_inputs();
  const auto run_it = [](const std::string& input) {
    return run_input(reinterpret_cast<const uint8_t*>(input.data()), input.size());
  };
  FuzzTarget target{"fuzz_hosts", {}, nullptr, nullptr, nullptr};
  for (const Seed& seed : seeds) target.seeds.push_back(seed.input());
  target.check_seed = [&](const std::string& seed) {
    const Outcome outcome = run_it(seed);
    CHECK(outcome.status.ok() || outcome.status.code() == Code::left, "%s", outcome.status.message().c_str());
    CHECK(outcome.events >= 3, "%d events", outcome.events);
  };
  target.mutate = [&](std::mt19937& random) { return mutate(seeds, random); };
  target.run = [&](const std::string& input) { (void)run_it(input); };
  return run_target(argc, argv, target);
}

#endif  // HOROVOD_LIBFUZZER
