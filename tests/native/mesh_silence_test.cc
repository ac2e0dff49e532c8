// How long a host may be silent: HOROVOD_UNREACHABLE_TIMEOUT_SECONDS counts from when it begins to owe an answer.
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdint>

#include <linux/tcp.h>

#include "check.h"
#include "named_tests.h"
#include "transport/mesh_socket.h"

using namespace horovod;
using namespace horovod::testing;
using wire::Answers;
using wire::Silence;

namespace {

Answers owes(int64_t last_ms, uint64_t acknowledged = 7) {
  return {.owed = true, .certainly = true, .last_ms = last_ms, .acknowledged = acknowledged};
}

void a_pause_before_the_debt_does_not_count() {
  Silence silence;
  CHECK(silence.owed_ms({.last_ms = 9'000, .acknowledged = 7}, 100'000) == 0, "nothing was sent for 9 s");
  CHECK(silence.owed_ms(owes(10'000), 101'000) == 0, "the debt is seen for the first time");
  CHECK(silence.owed_ms(owes(15'000), 106'000) == 5'000);
  CHECK(silence.owed_ms(owes(29'500), 120'500) == 19'500);
}

void each_acknowledgement_begins_anew() {
  Silence silence;
  silence.owed_ms(owes(0), 100'000);
  CHECK(silence.owed_ms(owes(800), 119'000) == 800, "something was acknowledged just before");
  CHECK(silence.owed_ms(owes(9'000, 8), 130'000) == 0, "this is another debt, perhaps a moment old");
  CHECK(silence.owed_ms(owes(10'000, 8), 131'000) == 1'000);
}

void who_does_not_look_for_long_begins_anew() {
  Silence silence;
  silence.owed_ms(owes(0, 1), 100'000);  // acknowledged soon after, and nobody looked
  CHECK(silence.owed_ms(owes(9'000, 2), 130'000) == 0);
}

void what_counts_ends_when_it_was_last_asked() {
  Silence silence;
  silence.owed_ms(owes(0), 100'000);
  Answers answers = owes(21'000);
  answers.asked_ms = 8'000;
  CHECK(silence.owed_ms(answers, 121'000) == 13'000, "the network may be whole since then");
  answers.last_ms = 26'000;
  answers.asked_ms = 500;
  CHECK(silence.owed_ms(answers, 126'000) == 0, "the answer may be on its way");
  answers.last_ms = 27'000;
  answers.asked_ms = 1'500;
  CHECK(silence.owed_ms(answers, 127'000) == 25'500);
}

void questions_count_from_the_first() {
  Silence silence;
  silence.owed_ms({.last_ms = 9'000}, 100'000);
  const Answers one{.owed = true, .last_ms = 10'000};
  CHECK(silence.owed_ms(one, 101'000) == 0, "one question says nothing");
  Answers two = one;
  two.certainly = true;
  two.last_ms = 14'000;
  CHECK(silence.owed_ms(two, 105'000) == 4'000, "but it began the debt");
}

void the_kernel_asks_for_as_long_as_the_limit() {
  wire::Socket socket(::socket(AF_INET, SOCK_STREAM, 0));
  for (const int limit_ms : {20'000, 5'000, 7'000, 60'000}) {
    CHECK(wire::prepare_stream(socket.fd(), limit_ms));
    const auto value = [&](int option) {
      int found = 0;
      socklen_t length = sizeof(found);
      CHECK(getsockopt(socket.fd(), IPPROTO_TCP, option, &found, &length) == 0);
      return found;
    };
    CHECK(value(TCP_KEEPINTVL) * value(TCP_KEEPCNT) * 1000 >= limit_ms);
    CHECK(value(TCP_KEEPINTVL) * value(TCP_KEEPCNT) * 1000 <= limit_ms + 1000 * value(TCP_KEEPINTVL));
    CHECK(value(TCP_KEEPIDLE) * 1000 <= limit_ms);
  }
}

}  // namespace

int main(int argc, char** argv) {
  static constexpr NamedTest kTests[] = {
      {"a pause before the debt does not count", a_pause_before_the_debt_does_not_count},
      {"each acknowledgement begins anew", each_acknowledgement_begins_anew},
      {"who does not look for long begins anew", who_does_not_look_for_long_begins_anew},
      {"what counts ends when it was last asked", what_counts_ends_when_it_was_last_asked},
      {"questions count from the first", questions_count_from_the_first},
      {"the kernel asks for as long as the limit", the_kernel_asks_for_as_long_as_the_limit},
  };
  return run_named(argc, argv, kTests);
}
