// What a program in this folder says before it ends because something is not as it should be. Checks work in any thread
// and stay on in every build.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>

#include "base/status.h"

// CHECK(condition) or CHECK(condition, format, ...). What stdout holds comes out first: how far the program came.
#define CHECK(condition, ...)                                                     \
  do {                                                                            \
    if (!(condition)) {                                                           \
      std::fflush(stdout);                                                        \
      std::fprintf(stderr, "%s:%d: CHECK(%s)\n", __FILE__, __LINE__, #condition); \
      __VA_OPT__(std::fprintf(stderr, __VA_ARGS__); std::fputc('\n', stderr);)    \
      std::abort();                                                               \
    }                                                                             \
  } while (0)

#define CHECK_OK(expression)                                                             \
  do {                                                                                   \
    const ::horovod::Status check_status = (expression);                                 \
    if (!check_status.ok()) {                                                            \
      std::fflush(stdout);                                                               \
      std::fprintf(stderr, "%s:%d: CHECK_OK(%s): %s\n", __FILE__, __LINE__, #expression, \
                   check_status.message().c_str());                                      \
      std::abort();                                                                      \
    }                                                                                    \
  } while (0)

namespace horovod::testing {

// Says what it found instead, which CHECK alone can't.
inline bool contains(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return true;
  std::fprintf(stderr, "\"%s\" lacks \"%s\"\n", text.c_str(), part.c_str());
  return false;
}

// An error with this code that holds these facts (a rank, a host, a value), whatever its words are; it may begin with
// one.
template <typename... Facts>
bool ends_with(const std::string& text, ErrorCode code, const Facts&... facts) {
  const std::string end = coded(code, "");
  if (text.ends_with(end))
    return ((text.find(capitalized(facts)) != std::string::npos || contains(text, facts)) && ...);
  std::fprintf(stderr, "\"%s\" does not end with \"%s\"\n", text.c_str(), end.c_str());
  return false;
}

template <typename... Facts>
bool ends_with(const Status& status, ErrorCode code, const Facts&... facts) {
  return ends_with(status.message(), code, facts...);
}

}  // namespace horovod::testing
