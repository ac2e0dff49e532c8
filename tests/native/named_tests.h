// A program of tests with names. Without arguments it runs all of them, with NAME those whose name contains NAME. A
// test that hangs ends the program, and is named.
#pragma once

#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string>

#include "base/clock.h"

namespace horovod::testing {

struct NamedTest {
  const char* name;
  void (*run)();
};

constexpr unsigned kTestSeconds = 240;  // the longest take seconds, with sanitizers and other work beside tens

// Written before the alarm is set, read by the handler: no other thread takes part.
inline const char* volatile running_test = "";

extern "C" inline void name_hanging_test(int) {  // calls only what a handler of signals may
  for (const char* part : {"HANGS: ", static_cast<const char*>(running_test), "\n"}) {
    if (::write(STDERR_FILENO, part, std::strlen(part)) < 0) break;
  }
  std::abort();
}

inline int run_named(int argc, char** argv, std::span<const NamedTest> tests) {
  const std::string wanted = argc > 1 ? argv[1] : "";
  std::signal(SIGALRM, name_hanging_test);
  for (const NamedTest& test : tests) {
    if (std::string(test.name).find(wanted) == std::string::npos) continue;
    const int64_t start_us = now_us();
    running_test = test.name;
    ::alarm(kTestSeconds);
    test.run();
    ::alarm(0);
    std::printf("ok %s (%.2f s)\n", test.name, static_cast<double>(now_us() - start_us) / 1e6);
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace horovod::testing
