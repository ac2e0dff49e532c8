// Ends of TensorFlow's kernels are copied, kept after TensorFlow's own is gone, moved, called and destroyed.
// TensorFlow's are std::functions of GNU's C++ library, so this tests something where that is the compiler's.
#include "tensorflow/done.h"

#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "check.h"
#include "named_tests.h"

using horovod::tensorflow::Done;
using namespace horovod::testing;

namespace {

Done copy_of(const std::function<void()>& function) {
  return Done(reinterpret_cast<const TF_AsyncOpKernelDoneCallback*>(&function));
}

#if defined(__GLIBCXX__)
// What the function captures: an address alone is kept inside of it, a shared pointer and more than two words are not.
void test_a_copy_outlives_the_function() {
  int calls = 0;
  std::optional<std::function<void()>> given([&calls] { ++calls; });
  const Done done = copy_of(*given);
  given.reset();
  done();
  CHECK(calls == 1);
}

void test_captured_values_are_copied_and_destroyed_once() {
  const auto counted = std::make_shared<int>(0);
  {
    std::optional<std::function<void()>> given(
        [counted, words = std::array<long, 8>{1, 2, 3}] { *counted += words[2]; });
    CHECK(counted.use_count() == 2);
    Done done = copy_of(*given);
    CHECK(counted.use_count() == 3);
    given.reset();
    CHECK(counted.use_count() == 2);
    Done moved = std::move(done);
    done = std::move(moved);
    CHECK(counted.use_count() == 2);
    std::thread([done = std::move(done)] { done(); }).join();
    CHECK(*counted == 3 && counted.use_count() == 1);
  }
  CHECK(counted.use_count() == 1);
}

void test_an_empty_function_may_be_copied() {
  Done done = copy_of({});
  const auto counted = std::make_shared<int>(0);
  done = copy_of([counted] {});
  done = Done();
  CHECK(counted.use_count() == 1);
}

const NamedTest kTests[] = {
    {"a_copy_outlives_the_function", test_a_copy_outlives_the_function},
    {"captured_values_are_copied_and_destroyed_once", test_captured_values_are_copied_and_destroyed_once},
    {"an_empty_function_may_be_copied", test_an_empty_function_may_be_copied},
};
#else
const NamedTest kTests[] = {};
#endif

}  // namespace

int main(int argc, char** argv) { return run_named(argc, argv, kTests); }
