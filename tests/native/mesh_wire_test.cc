// Connections whose bytes are signed or encrypted: they carry what plain ones carry, and whatever a man in the middle
// does to them, nobody takes what was not sent.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "mesh_world.h"
#include "named_tests.h"
#include "sealed_records.h"

using namespace horovod;
using namespace horovod::testing;

namespace {

Config with(WireMode mode, uint64_t records_per_key = 3) {
  Config config;
  config.wire = mode;
  config.wire_records_per_key = records_per_key;
  return config;
}

std::vector<uint8_t> numbered(size_t bytes, unsigned seed) {
  std::vector<uint8_t> made(bytes);
  for (size_t i = 0; i < bytes; ++i) made[i] = static_cast<uint8_t>(i * 7 + (i >> 9) + seed);
  return made;
}

// -- whole meshes -----------------------------------------------------------------------------------------------------

void test_what_plain_ones_carry() {
  for (const WireMode mode : {WireMode::authenticated, WireMode::encrypted}) {
    for (const Wire wire : {Wire::pair, Wire::tcp}) {
      for (const int connections : {1, 3}) {
        World world(3, wire, connections, with(mode));
        in_ranks(3, [&](int rank) {
          for (const size_t bytes : {size_t{1}, size_t{1000}, size_t{65536}, size_t{65537}, size_t{3'000'000}}) {
            std::vector<std::vector<uint8_t>> in(3), out(3);
            std::vector<Transfer> sends, receives;
            for (int peer = 0; peer < 3; ++peer) {
              if (peer == rank) continue;
              out[peer] = numbered(bytes, static_cast<unsigned>(10 * rank + peer));
              in[peer].resize(bytes);
              const size_t half = bytes / 2;
              sends.push_back({peer, {{out[peer].data(), half}, {out[peer].data() + half, bytes - half}}});
              receives.push_back({peer, {{in[peer].data(), bytes}}});
              const std::array<uint32_t, 3> ids{1, 2, static_cast<uint32_t>(bytes)};
              CHECK_OK(world[rank].send_control(peer, ControlKind::ready, ids, "text"));
            }
            CHECK_OK(world[rank].exchange(sends, receives));
            for (int peer = 0; peer < 3; ++peer) {
              if (peer == rank) continue;
              CHECK(in[peer] == numbered(bytes, static_cast<unsigned>(10 * peer + rank)));
            }
          }
          for (int heard = 0; heard < 2 * 5;) {
            ControlFrame frame;
            bool found = false;
            CHECK_OK(world[rank].next_control(frame, found));
            if (!found) CHECK_OK(world[rank].wait(1'000'000));
            if (!found) continue;
            CHECK(frame.kind == ControlKind::ready && frame.ids.size() == 3 && frame.text == "text");
            ++heard;
          }
        });
      }
    }
  }
}

void test_more_than_the_sockets_hold() {  // both directions at once, so what waits must be sent while data is awaited
  World world(2, Wire::tcp, 2, with(WireMode::encrypted, 100));
  in_ranks(2, [&](int rank) {
    const std::vector<uint8_t> out = numbered(40'000'000, static_cast<unsigned>(rank));
    std::vector<uint8_t> in(out.size());
    const Transfer send{1 - rank, {{const_cast<uint8_t*>(out.data()), out.size()}}};
    const Transfer receive{1 - rank, {{in.data(), in.size()}}};
    CHECK_OK(world[rank].exchange({&send, 1}, {&receive, 1}));
    CHECK(in == numbered(in.size(), static_cast<unsigned>(1 - rank)));
  });
}

void test_a_goodbye_comes_through() {
  for (const ControlKind kind : {ControlKind::abort, ControlKind::leave}) {
    World world(2, Wire::tcp, 2, with(WireMode::encrypted));
    std::thread peer([&] {
      CHECK_OK(send_to(world[1], 0, 1'000'000));
      world[1].announce_end(kind, "rank 1 has shut down: it was told to. [shut-down]");
      world[1].linger(1'000'000);
      world.meshes[1].reset();
    });
    Status status = receive_from(world[0], 1, 1'000'000);
    CHECK(status.ok() || kind == ControlKind::abort);  // which does not wait for the other connection
    if (status.ok()) status = receive_from(world[0], 1, 1);
    CHECK(status.message() == "rank 1 has shut down: it was told to. [shut-down]");
    peer.join();
  }
}

void test_keys_are_needed() {
  int fds[2];
  connect_pair(Wire::pair, fds);
  AbortSignal abort;
  Status status;
  CHECK(!Mesh::create(0, 7, {{"me", {}}, {"them", {fds[0]}}}, with(WireMode::encrypted), abort, status));
  CHECK(ends_with(status, error_code::internal, "keys", "them"));
  close(fds[1]);
}

void test_no_library() {
  Status status;
  CHECK(!crypto::library("/no/such/libcrypto.so", status));
  CHECK(ends_with(status, error_code::missing_library, "/no/such/libcrypto.so", "HOROVOD_WIRE=plain"));
}

// A man in the middle changes one bit of what rank 1 sends to rank 0.
void test_both_ranks_are_named() {
  for (const WireMode mode : {WireMode::authenticated, WireMode::encrypted}) {
    int left[2], right[2];
    connect_pair(Wire::tcp, left);
    connect_pair(Wire::tcp, right);
    AbortSignal aborts[2];
    Status status;
    auto zero = Mesh::create(0, 7, {{label_of(0), {}}, {label_of(1), {left[0]}, {keys_of(0, 1, 0)}}}, with(mode),
                             aborts[0], status);
    CHECK_OK(status);
    auto one = Mesh::create(1, 7, {{label_of(0), {right[0]}, {keys_of(1, 0, 0)}}, {label_of(1), {}}}, with(mode),
                            aborts[1], status);
    CHECK_OK(status);
    std::thread middle([&] {
      char buffer[4096];
      ssize_t got;
      for (ssize_t before = 0; (got = read(right[1], buffer, sizeof(buffer))) > 0; before += got) {
        if (before <= 5000 && 5000 < before + got) buffer[5000 - before] ^= 4;
        if (write(left[1], buffer, static_cast<size_t>(got)) != got) break;
      }
      close(left[1]);
    });
    std::thread sender([&] { (void)send_to(*one, 0, 100'000); });
    status = receive_from(*zero, 1, 100'000);
    CHECK(status.code() == Code::aborted);
    CHECK(ends_with(status, error_code::tampered_data, label_of(1) + " to " + label_of(0)));
    sender.join();
    one.reset();
    middle.join();
    close(right[1]);
  }
}

// -- one stream -------------------------------------------------------------------------------------------------------

const std::vector<std::string> kMessages = {"the first message", "x", "the third message", "the fourth", "and a fifth"};

void test_what_lies_on_the_socket() {
  const std::string text = joined(kMessages);
  CHECK(hear(joined(records_of(kMessages, true)), true).text == text);
  CHECK(hear(joined(records_of(kMessages, false)), false).text == text);
  CHECK(joined(records_of(kMessages, true)).find("message") == std::string::npos);
  CHECK(joined(records_of(kMessages, false)).find("message") != std::string::npos);
  const std::vector<std::string> same = records_of(std::vector<std::string>(8, "the same again"), true);
  for (size_t i = 0; i < same.size(); ++i) {
    for (size_t j = 0; j < i; ++j) CHECK(same[i].substr(4) != same[j].substr(4), "records %zu and %zu", i, j);
  }
}

void test_nothing_forged_is_taken() {
  for (const bool hides : {false, true}) {
    const std::vector<std::string> records = records_of(kMessages, hides);
    const std::string text = joined(kMessages);
    const std::string whole = joined(records);
    const auto refused = [&](const std::string& bytes, size_t good, int error) {
      const Heard heard = hear(bytes, hides);
      CHECK(heard.error == error, "%s", std::strerror(heard.error));
      CHECK(heard.text == joined({kMessages.begin(), kMessages.begin() + static_cast<std::ptrdiff_t>(good)}));
    };
    size_t at = 0;
    for (size_t record = 0; record < records.size(); ++record) {
      for (size_t i = 0; i < records[record].size(); ++i, ++at) {
        std::string changed = whole;
        changed[at] ^= 1;
        const Heard heard = hear(changed, hides);
        CHECK(heard.error == EBADMSG || heard.error == ECONNRESET, "byte %zu", at);
        CHECK(heard.text == joined({kMessages.begin(), kMessages.begin() + static_cast<std::ptrdiff_t>(record)}));
        if (i > 0) refused(whole.substr(0, at), record, ECONNRESET);  // in the middle of a record
      }
    }
    refused(records[0] + records[0], 1, EBADMSG);               // repeated
    refused(records[0] + records[2] + records[1], 1, EBADMSG);  // moved
    refused(records[0] + records[1] + records[3], 2, EBADMSG);  // left out, where the next key begins
    refused(records[1], 0, EBADMSG);
    CHECK(hear(whole, hides, 0).error == EBADMSG);     // sent back to its sender
    CHECK(hear(whole, hides, 1, 1).error == EBADMSG);  // on another connection
    CHECK(hear(whole, !hides).error == EBADMSG);       // of the other mode
  }
}

const NamedTest kTests[] = {
    {"what_plain_ones_carry", test_what_plain_ones_carry},
    {"more_than_the_sockets_hold", test_more_than_the_sockets_hold},
    {"a_goodbye_comes_through", test_a_goodbye_comes_through},
    {"keys_are_needed", test_keys_are_needed},
    {"no_library", test_no_library},
    {"both_ranks_are_named", test_both_ranks_are_named},
    {"what_lies_on_the_socket", test_what_lies_on_the_socket},
    {"nothing_forged_is_taken", test_nothing_forged_is_taken},
};

}  // namespace

int main(int argc, char** argv) { return run_named(argc, argv, kTests); }
