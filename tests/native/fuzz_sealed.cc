// Fuzz target for what a rank parses of a signed or encrypted connection before it has proven anything: the lengths of
// records, and records that were cut, repeated, moved or made up. The input is what a man in the middle puts on the
// socket; he has seen what rank 0 sent. Whatever comes, the reader gets a beginning of what was sent and then an end:
// no other byte, no crash, no hang, no access outside of the memory (sanitizers see to that). How it is run is in
// fuzz.h.
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "fuzz.h"
#include "sealed_records.h"

using namespace horovod;
using namespace horovod::testing;

namespace {

const std::vector<std::string>& messages() {
  static const std::vector<std::string> made = {"first", std::string(30'000, 'x'), "a", std::string(1000, 'y'), "last"};
  return made;
}

// The first byte of an input says whether the connection is encrypted.
Heard run_input(const uint8_t* data, size_t size) {
  if (size == 0) return {"", 0};
  static const std::string sent = joined(messages());
  Heard heard = hear({reinterpret_cast<const char*>(data) + 1, size - 1}, data[0] & 1);
  CHECK(sent.compare(0, heard.text.size(), heard.text) == 0, "what was not sent was taken");
  CHECK(heard.error == 0 || heard.error == EBADMSG || heard.error == ECONNRESET, "%s", std::strerror(heard.error));
  return heard;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  (void)run_input(data, size);
  return 0;
}

#ifndef HOROVOD_LIBFUZZER

int main(int argc, char** argv) {
  const auto run_it = [](const std::string& input) {
    return run_input(reinterpret_cast<const uint8_t*>(input.data()), input.size());
  };
  const std::vector<std::string> records[] = {records_of(messages(), false), records_of(messages(), true)};
  FuzzTarget target{"fuzz_sealed", {}, nullptr, nullptr, nullptr};
  for (const char mode : {0, 1}) target.seeds.push_back(std::string(1, mode) + joined(records[static_cast<int>(mode)]));
  target.check_seed = [&](const std::string& seed) {
    const Heard heard = run_it(seed);
    CHECK(heard.error == 0 && heard.text == joined(messages()));
  };
  target.mutate = [&](std::mt19937& random) {
    const auto mode = static_cast<char>(random() % 2);
    std::vector<std::string> pieces = records[random() % 8 == 0 ? 1 - mode : mode];
    spoil(pieces, random, {0, 4}, [&random] { return std::string(random() % 200, static_cast<char>(random())); });
    return std::string(1, mode) + joined(pieces);
  };
  target.run = [&](const std::string& input) { (void)run_it(input); };
  return run_target(argc, argv, target);
}

#endif  // HOROVOD_LIBFUZZER
