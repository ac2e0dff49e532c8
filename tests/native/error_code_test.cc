// How a sentence carries its code through other sentences and through places with little room.
#include "base/error_code.h"
#include "check.h"
#include "named_tests.h"

using namespace horovod;
using namespace horovod::testing;

namespace {

void test_a_sentence_carries_its_code() {
  const std::string text = coded(error_code::peer_lost, "Rank 1 was lost.");
  CHECK(text == "Rank 1 was lost. [peer-lost]" && has_code(text));
  CHECK(without_code(text) == "Rank 1 was lost.");
  CHECK(coded(error_code::internal, "Why: " + text) == "Why: Rank 1 was lost. [internal]");
  CHECK(with_more(text, " (Rank 0 says so.)") == "Rank 1 was lost. (Rank 0 says so.) [peer-lost]");
  CHECK(has_code("A code that only Python has. [wrong-token]"));
}

void test_what_is_no_code() {
  for (const std::string text : {"", "]", "x]", " [", " []", "Rank 1 was lost.", "ranks [0, 1]", "x[deadlock]",
                                 "the ranks [3]", "in [unknown-host] or not", "of shape [Rows]"}) {
    CHECK(!has_code(text) && without_code(text) == text, "%s", text.c_str());
    CHECK(with_more(text, "!") == text + "!");
  }
}

void test_what_is_cut_off_keeps_its_code() {
  const std::string text = coded(error_code::peer_lost, "Rank 1 was lost.");
  CHECK(shortened(text, text.size()) == text);
  CHECK(shortened(text, text.size() - 6) == "Rank 1 was [peer-lost]");
  CHECK(shortened(text, 12) == " [peer-lost]" && shortened(text, 5) == "Rank ");
  CHECK(shortened("Rank 1 was lost.", 6) == "Rank 1");
}

const NamedTest kTests[] = {
    {"a_sentence_carries_its_code", test_a_sentence_carries_its_code},
    {"what_is_no_code", test_what_is_no_code},
    {"what_is_cut_off_keeps_its_code", test_what_is_cut_off_keeps_its_code},
};

}  // namespace

int main(int argc, char** argv) { return run_named(argc, argv, kTests); }
