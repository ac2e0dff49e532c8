// What the fuzz targets in this folder share: how good inputs become bad ones, and the program around them. Cases are
// made from a seed, alike with any compiler; a case that crashes or hangs says how it is run alone:
//
//   fuzz_NAME [cases [seed]]     mutates the good inputs that the target knows
//   fuzz_NAME --only CASE SEED   one of these cases again
//   fuzz_NAME --corpus FOLDER    writes the good inputs, to begin with for libFuzzer
//
// With clang and -DHOROVOD_SANITIZE=fuzzer,address they are libFuzzer targets: fuzz_NAME FOLDER
#pragma once

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "check.h"

namespace horovod::testing {

// One to eight bytes somewhere become a number at which mistakes begin.
inline void overwrite(std::string& text, std::mt19937& random) {
  static const uint64_t interesting[] = {0,
                                         1,
                                         2,
                                         3,
                                         4,
                                         7,
                                         8,
                                         0x7f,
                                         0x80,
                                         0xff,
                                         0x4000,
                                         0x7fffffff,
                                         0xffffffff,
                                         uint64_t{1} << 48,
                                         ~uint64_t{0},
                                         uint64_t{1} << 63};
  if (text.empty()) return;
  const size_t at = random() % text.size();
  const uint64_t value = interesting[random() % std::size(interesting)];
  const size_t width = size_t{1} << (random() % 4);
  std::memcpy(text.data() + at, &value, std::min(width, text.size() - at));
}

// The same in bytes [begin, end) of a piece that is long enough: where its lengths and counts are.
inline void overwrite_within(std::string& piece, size_t begin, size_t end, std::mt19937& random) {
  if (piece.size() < end) return;
  std::string part = piece.substr(begin, end - begin);
  overwrite(part, random);
  piece.replace(begin, end - begin, part);
}

// An input is pieces (frames, steps) in order: up to three changes in them or in their order. make_up() gives a piece
// that nobody ever sent; head is where a piece keeps its lengths.
inline void spoil(std::vector<std::string>& pieces, std::mt19937& random, std::pair<size_t, size_t> head,
                  const std::function<std::string()>& make_up) {
  for (int count = static_cast<int>(random() % 4); count > 0; --count) {
    const size_t at = pieces.empty() ? 0 : random() % pieces.size();
    const auto place = pieces.begin() + static_cast<std::ptrdiff_t>(at);
    switch (pieces.empty() ? 5 : random() % 9) {
      case 0:  // a bit
        pieces[at][random() % pieces[at].size()] ^= static_cast<char>(1 << random() % 8);
        break;
      case 1:  // cut off, with the head as it was
        pieces[at].resize(random() % pieces[at].size() + 1);
        break;
      case 2:
        overwrite(pieces[at], random);
        break;
      case 3:
        overwrite_within(pieces[at], head.first, head.second, random);
        break;
      case 4:
        std::swap(pieces[at], pieces[random() % pieces.size()]);
        break;
      case 5:
        pieces.insert(place, make_up());
        break;
      case 6: {
        const std::string again = pieces[at];
        pieces.insert(place, again);
        break;
      }
      case 7:
        pieces.erase(place);
        break;
      default:  // noise in between
        pieces[at].append(random() % 100, static_cast<char>(random()));
    }
  }
}

}  // namespace horovod::testing

#ifndef HOROVOD_LIBFUZZER

// A count in an input may ask for more memory than there is; that must be a sentence, not the sanitizer's end.
extern "C" const char* __asan_default_options() { return "allocator_may_return_null=1:max_allocation_size_mb=1024"; }
extern "C" const char* __tsan_default_options() { return "allocator_may_return_null=1:max_allocation_size_mb=1024"; }
extern "C" void __sanitizer_set_death_callback(void (*callback)()) __attribute__((weak));

namespace horovod::testing {

struct FuzzTarget {
  const char* name;
  std::vector<std::string> seeds;                      // the good inputs
  std::function<void(const std::string&)> check_seed;  // unchanged they must work, else nothing is tested
  std::function<std::string(std::mt19937&)> mutate;    // one of them, spoilt
  std::function<void(const std::string&)> run;
};

inline struct FuzzCase {
  const char* target = "";
  unsigned long long number = 0, seed = 0;
} running_case;

inline void say_which_case() {
  std::fprintf(stderr, "%s: in case %llu of seed %llu; run it alone with: %s --only %llu %llu\n", running_case.target,
               running_case.number, running_case.seed, running_case.target, running_case.number, running_case.seed);
}

inline void on_fuzz_signal(int number) {
  say_which_case();
  if (number == SIGALRM) std::fprintf(stderr, "%s: it hangs\n", running_case.target);
  (void)signal(number, SIG_DFL);
  (void)signal(SIGABRT, SIG_DFL);
  number == SIGALRM ? std::abort() : static_cast<void>(raise(number));
}

inline std::ptrdiff_t open_descriptors() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), std::filesystem::directory_iterator());
}

inline int run_target(int argc, char** argv, const FuzzTarget& target) {
  running_case.target = target.name;
  for (const int number : {SIGALRM, SIGABRT}) (void)signal(number, on_fuzz_signal);
  if (__sanitizer_set_death_callback) __sanitizer_set_death_callback(say_which_case);
  const auto run_case = [&target] {
    std::mt19937 random(static_cast<unsigned>(running_case.seed * 1'000'003 + running_case.number));
    const std::string input = target.mutate(random);
    alarm(60);
    target.run(input);
    alarm(0);
  };
  const std::string first = argc > 1 ? argv[1] : "2000";
  if (first == "--corpus" && argc > 2) {
    for (size_t i = 0; i < target.seeds.size(); ++i) {
      std::ofstream(std::filesystem::path(argv[2]) / ("seed" + std::to_string(i)), std::ios::binary) << target.seeds[i];
    }
    return 0;
  }
  const std::ptrdiff_t before = open_descriptors();
  if (first == "--only" && argc > 3) {
    running_case.number = std::strtoull(argv[2], nullptr, 10);
    running_case.seed = std::strtoull(argv[3], nullptr, 10);
    run_case();
    return 0;
  }
  const unsigned long long cases = std::strtoull(first.c_str(), nullptr, 10);
  running_case.seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  for (const std::string& seed : target.seeds) target.check_seed(seed);
  for (running_case.number = 0; running_case.number < cases; ++running_case.number) run_case();
  CHECK(open_descriptors() == before, "%td descriptors were lost", open_descriptors() - before);
  std::printf("%s: %llu cases of seed %llu: ok\n", target.name, cases, running_case.seed);
  return 0;
}

}  // namespace horovod::testing

#endif  // HOROVOD_LIBFUZZER
