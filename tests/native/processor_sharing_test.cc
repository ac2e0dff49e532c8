// When a member that waits gives its processor away: with hints of members that are where and wait for what the test
// says.
#include "transport/processor_sharing.h"

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include <sched.h>

#include "check.h"
#include "named_tests.h"

using namespace horovod;
using namespace horovod::testing;

namespace {

std::vector<int> allowed_processors() {
  cpu_set_t set;
  CHECK(sched_getaffinity(0, sizeof set, &set) == 0);
  std::vector<int> found;
  for (int processor = 0; processor < CPU_SETSIZE; ++processor) {
    if (CPU_ISSET(processor, &set)) found.push_back(processor);
  }
  return found;
}

void allow(const std::vector<int>& processors) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int processor : processors) CPU_SET(processor, &set);
  CHECK(sched_setaffinity(0, sizeof set, &set) == 0);
}

// Members whose threads are all this one.
struct Members {
  struct Area {
    WaitHint hint;
    std::array<std::atomic<uint64_t>, 8> words;
  };

  explicit Members(int count) {
    std::vector<std::byte*> places;
    std::vector<WaitHint*> hints;
    for (int member = 0; member < count; ++member) {
      areas.push_back(std::make_unique<Area>());  // as new memory is: zeros
      places.push_back(reinterpret_cast<std::byte*>(areas.back().get()));
      hints.push_back(&areas.back()->hint);
    }
    for (int member = 0; member < count; ++member) sharings.emplace_back(member, places, sizeof(Area), hints);
  }
  Awaited awaited(int member, size_t word, uint64_t value) const {
    return {member, &areas[static_cast<size_t>(member)]->words[word], value};
  }
  void reach(int member, size_t word, uint64_t value) { areas[static_cast<size_t>(member)]->words[word].store(value); }

  std::vector<std::unique_ptr<Area>> areas;
  std::vector<ProcessorSharing> sharings;
};

// One processor for three members.
void test_who_could_run() {
  const std::vector<int> before = allowed_processors();
  allow({before[0]});
  Members members(3);
  ProcessorSharing &mine = members.sharings[0], &second = members.sharings[1], &third = members.sharings[2];
  CHECK(mine.crowded());
  const Awaited for_third = members.awaited(2, 3, 7);
  mine.begin(&for_third);
  CHECK(!mine.somebody_could_run(), "members that never waited were never seen here");

  second.begin(&for_third);
  CHECK(!mine.somebody_could_run(), "the other one here waits for the same");
  members.reach(2, 3, 6);
  CHECK(!mine.somebody_could_run(), "it waits for more");
  members.reach(2, 3, 7);
  CHECK(mine.somebody_could_run(), "what it waits for has come");

  const Awaited for_me = members.awaited(0, 0, 1);
  second.begin(&for_me);
  third.begin(&for_me);
  CHECK(!mine.somebody_could_run());
  members.reach(0, 0, 2);
  CHECK(mine.somebody_could_run(), "more than that has come");

  const Awaited for_nothing = members.awaited(1, 7, 1);
  second.begin(&for_nothing);
  third.begin(&for_nothing);
  CHECK(!mine.somebody_could_run());
  third.end();
  CHECK(mine.somebody_could_run(), "it does not wait");
  third.begin(nullptr);
  CHECK(mine.somebody_could_run(), "it does not say for what it waits");
  members.areas[2]->hint.processor.store(static_cast<uint32_t>(before[0]) + 2);
  CHECK(!mine.somebody_could_run(), "it was last seen elsewhere");
  allow(before);
}

// Whatever another process writes there, nothing is read outside of the areas (a sanitizer would say so).
void test_hints_that_point_nowhere() {
  const std::vector<int> before = allowed_processors();
  allow({before[0]});
  Members members(2);
  const Awaited for_second = members.awaited(1, 0, 1);
  members.sharings[0].begin(&for_second);
  members.sharings[1].begin(&for_second);
  CHECK(!members.sharings[0].somebody_could_run());
  const uint64_t last = sizeof(Members::Area) - sizeof(uint64_t);
  const auto place = [](uint64_t member, uint64_t offset) { return 1 + (member << 48 | offset); };
  for (const uint64_t hostile : {place(0, last + 1), place(0, last + 8), place(1, 3), place(2, 0), place(0xffff, 0),
                                 place(0, (uint64_t{1} << 48) - 8), ~uint64_t{0}, uint64_t{0}}) {
    members.areas[1]->hint.word.store(hostile);
    CHECK(members.sharings[0].somebody_could_run(), "word %llx", static_cast<unsigned long long>(hostile));
  }
  members.areas[1]->hint.word.store(place(0, last));
  CHECK(!members.sharings[0].somebody_could_run(), "the last word of an area is one");
  allow(before);
}

constexpr NamedTest kTests[] = {
    {"who_could_run", test_who_could_run},
    {"hints_that_point_nowhere", test_hints_that_point_nowhere},
};

}  // namespace

int main(int argc, char** argv) { return run_named(argc, argv, kTests); }
