// Fuzz target for what a rank reads that another rank of its host has written into shared memory: the messages of
// engine/host_channel.h, their cursors and flags, and the sentence with which a rank ends. They are read by HostReader
// alone, by the log of a host's first rank, and by that of another one; both logs are real, with a region, a mesh, and
// good logs on the other hosts, from which frames with any content may come in between. Whatever is there, every call
// must end with a Status that has a sentence, and a log must report only what this rank has arrived at, once.
//
// The input is a list of steps, see hosts_inputs.h. How the program is run is in fuzz.h.
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

#include "base/clock.h"
#include "check.h"
#include "collectives/mesh/eager.h"
#include "fuzz.h"
#include "fuzz_work.h"
#include "hosts_inputs.h"
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
        HVD_TRY(log->wait(now_us() + 100));
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
