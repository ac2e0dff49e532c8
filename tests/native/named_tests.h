// A program of tests with names. Without arguments it runs all of them, with NAME those whose name contains NAME.
#pragma once

#include <chrono>
#include <cstdio>
#include <initializer_list>
#include <string>

namespace horovod::testing {

struct NamedTest {
  const char* name;
  void (*run)();
};

inline double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline int run_named(int argc, char** argv, std::initializer_list<NamedTest> tests) {
  const std::string wanted = argc > 1 ? argv[1] : "";
  for (const NamedTest& test : tests) {
    if (std::string(test.name).find(wanted) == std::string::npos) continue;
    const double start = now_s();
    test.run();
    std::printf("ok %s (%.2f s)\n", test.name, now_s() - start);
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace horovod::testing
