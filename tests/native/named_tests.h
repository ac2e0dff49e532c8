// A program of tests with names. Without arguments it runs all of them, with NAME those whose name contains NAME.
#pragma once

#include <cstdio>
#include <span>
#include <string>

#include "base/clock.h"

namespace horovod::testing {

struct NamedTest {
  const char* name;
  void (*run)();
};

inline int run_named(int argc, char** argv, std::span<const NamedTest> tests) {
  const std::string wanted = argc > 1 ? argv[1] : "";
  for (const NamedTest& test : tests) {
    if (std::string(test.name).find(wanted) == std::string::npos) continue;
    const int64_t start_us = now_us();
    test.run();
    std::printf("ok %s (%.2f s)\n", test.name, static_cast<double>(now_us() - start_us) / 1e6);
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace horovod::testing
