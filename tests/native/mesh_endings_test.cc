// How connections of the TCP data plane end: a peer that is lost, aborts, leaves, stands still, or writes what no rank
// would. Whatever it is, everybody hears the cause, with the name of whose fault it is.
#include <linux/filter.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "mesh_world.h"
#include "named_tests.h"
#include "transport/mesh_frame.h"

using namespace horovod;
using namespace horovod::testing;

namespace {

Status wait_for_news(Mesh& mesh) {  // until wait() fails, taking frames
  for (;;) {
    ControlFrame frame;
    bool found = true;
    while (found) HVD_TRY(mesh.next_control(frame, found));
    HVD_TRY(mesh.wait(60'000'000));
  }
}

Status look_on(Mesh& mesh) {  // as beside a wait in shared memory
  for (bool busy = false;;) {
    HVD_TRY(mesh.progress(busy));
    std::this_thread::yield();
  }
}

void test_lost_peer() {
  for (const Wire wire : {Wire::pair, Wire::tcp}) {
    for (const int connections : {1, 3}) {
      {
        World world(3, wire, connections);
        world.meshes[2].reset();
        Status status = receive_from(world[0], 2, 10);
        CHECK(status.code() == Code::aborted && ends_with(status, error_code::peer_lost, label_of(2)));
        status = receive_from(world[0], 1, 10);  // final
        CHECK(ends_with(status, error_code::peer_lost, label_of(2)));
        status = wait_for_news(world[1]);
        CHECK(ends_with(status, error_code::peer_lost, label_of(2)));
      }
      {  // in the middle of a transfer, seen by a rank that waits for another one
        World world(3, wire, connections);
        std::thread victim([&] { (void)receive_from(world[0], 1, 10); });
        Flight flight;
        std::vector<uint8_t> out(64'000'000);
        const Transfer send{1, {{out.data(), out.size()}}};
        CHECK_OK(world[2].start({&send, 1}, {}, flight));
        std::thread receiver([&] {
          const Status status = receive_from(world[1], 2, out.size());
          CHECK(ends_with(status, error_code::peer_lost, label_of(2)));
        });
        world.meshes[2].reset();
        receiver.join();
        victim.join();
      }
      {  // while sending to it
        World world(2, wire, connections);
        std::thread closer([&] { world.meshes[1].reset(); });
        const Status status = send_to(world[0], 1, 50'000'000);
        CHECK(ends_with(status, error_code::peer_lost, label_of(1)));
        closer.join();
      }
    }
  }
}

void test_lost_behind_data_that_nobody_expects() {
  World world(3, Wire::tcp, 1);
  Flight flight;
  std::vector<uint8_t> out(100'000, 3);
  const Transfer send{0, {{out.data(), out.size()}}};
  CHECK_OK(world[1].start({&send, 1}, {}, flight));
  world.meshes[1].reset();
  CHECK(ends_with(receive_from(world[0], 2, 10), error_code::peer_lost, label_of(1)));
}

void test_abort_frame_is_the_cause() {
  for (const int connections : {1, 3}) {
    World world(3, Wire::tcp, connections);
    // Rank 2 aborts; rank 1 hears of it and ends too, without having told rank 0 yet. Rank 0 must hear the root cause,
    // although it needs rank 1 and sees its connection end.
    world[2].announce_end(ControlKind::abort, "rank 2 ran out of patience");
    CHECK(contains(wait_for_news(world[1]).message(), "rank 2 ran out of patience"));
    world.meshes[1].reset();
    const Status status = receive_from(world[0], 1, 10);
    CHECK(status.code() == Code::aborted && contains(status.message(), "rank 2 ran out of patience"));
    CHECK(contains(send_to(world[0], 2, 10).message(), "rank 2 ran out of patience"));
  }
  {  // behind data that nobody has asked for
    World world(2, Wire::tcp, 2);
    Flight flight;
    std::vector<uint8_t> out(1'000);
    const Transfer send{0, {{out.data(), out.size()}}};
    CHECK_OK(world[1].start({&send, 1}, {}, flight));
    world[1].announce_end(ControlKind::abort, "the reason");
    world.meshes[1].reset();
    CHECK(contains(wait_for_news(world[0]).message(), "the reason"));
  }
  for (const size_t bytes : {100'000u, 6'000'000u}) {  // behind so much that the sockets don't hold it all
    const auto receive = [](Mesh& mesh) { return receive_from(mesh, 2, 10); };
    for (const std::function<Status(Mesh&)>& wait :
         {std::function<Status(Mesh&)>(receive), {wait_for_news}, {look_on}}) {
      World world(3, Wire::tcp, 1);
      Flight flight;
      std::vector<uint8_t> out(bytes, 3);
      const Transfer send{0, {{out.data(), out.size()}}};
      CHECK_OK(world[1].start({&send, 1}, {}, flight));
      world.aborts[1].raise({Code::aborted, "the reason"});
      world[1].announce_end(ControlKind::abort, "the reason");
      std::thread aborter([&] { world[1].linger(60'000'000); });
      // Rank 0 waits for rank 2, which does nothing.
      const Status status = wait(world[0]);
      CHECK(status.code() == Code::aborted && status.message() == "the reason");
      aborter.join();
    }
  }
  for (const int connections : {1, 3}) {  // in the middle of data
    World world(2, Wire::tcp, connections);
    Flight flight;
    std::vector<uint8_t> out(50'000'000);
    const Transfer send{0, {{out.data(), out.size()}}};
    CHECK_OK(world[1].start({&send, 1}, {}, flight));
    world.aborts[1].raise({Code::aborted, "the reason"});
    world[1].announce_end(ControlKind::abort, "the reason");
    std::thread aborter([&] { world[1].linger(60'000'000); });
    CHECK(receive_from(world[0], 1, out.size()).message() == "the reason");
    aborter.join();
    CHECK(world[1].finish(flight).message() == "the reason");
  }
  {  // the local abort signal
    World world(2);
    std::thread aborter([&] {
      world.aborts[0].raise({Code::interrupted, "Ctrl-C"});
      world[0].wake();
    });
    CHECK(receive_from(world[0], 1, 10).message() == "Ctrl-C");
    aborter.join();
    CHECK(world[0].wait(1000).message() == "Ctrl-C");
  }
}

void test_leave() {
  for (const int connections : {1, 3}) {
    World world(3, Wire::tcp, connections);
    constexpr size_t kBytes = 1'000'000;
    std::vector<uint8_t> out(kBytes, 42), in(kBytes);
    std::thread leaver([&] {
      const Transfer send{0, {{out.data(), kBytes}}};
      CHECK_OK(world[1].exchange({&send, 1}, {}));
      world[1].announce_end(ControlKind::leave, "");
      world.meshes[1].reset();
    });
    const Transfer receive{1, {{in.data(), kBytes}}};
    CHECK_OK(world[0].exchange({}, {&receive, 1}));  // sent before it left
    CHECK(in == out);
    leaver.join();
    ControlFrame frame;
    for (bool found = false; !found;) {
      CHECK_OK(world[0].wait(1'000'000));
      CHECK_OK(world[0].next_control(frame, found));
    }
    CHECK(frame.kind == ControlKind::leave && frame.peer == 1 &&
          ends_with(frame.text, error_code::shut_down, label_of(1)));
    CHECK_OK(world[0].wait(1000));  // that alone is no failure
    std::thread other([&] { CHECK_OK(send_to(world[2], 0, 10)); });
    CHECK_OK(receive_from(world[0], 2, 10));  // and the others go on
    other.join();
    const Status status = receive_from(world[0], 1, 10);
    CHECK(status.code() == Code::left && ends_with(status, error_code::shut_down, label_of(1)));
  }
  {  // what it sent before is kept for when it is wanted, however far rank 0 has looked ahead meanwhile
    World world(3, Wire::tcp, 1);
    std::vector<uint8_t> out(12'000'000), in(out.size());
    for (size_t i = 0; i < out.size(); ++i) out[i] = static_cast<uint8_t>(i * 7 + i / 251);
    std::thread others([&] {
      const Transfer send{0, {{out.data(), out.size()}}};
      CHECK_OK(world[1].exchange({&send, 1}, {}));  // needs somebody who takes it in
      world[1].announce_end(ControlKind::leave, "");
      world.meshes[1].reset();
      CHECK_OK(send_to(world[2], 0, 10));
    });
    CHECK_OK(receive_from(world[0], 2, 10));
    others.join();
    const Transfer receive{1, {{in.data(), in.size()}}};
    CHECK_OK(world[0].exchange({}, {&receive, 1}));
    CHECK(in == out);
  }
  {  // it leaves while we wait for it, or send to it
    for (const bool sending : {false, true}) {
      World world(2, Wire::tcp, 3);
      std::thread leaver([&] { world[1].announce_end(ControlKind::leave, "bye"); });
      const Status status = sending ? send_to(world[0], 1, 50'000'000) : receive_from(world[0], 1, 1'000'000);
      CHECK(ends_with(status, error_code::shut_down, label_of(1), "bye"));
      leaver.join();
    }
  }
}

void test_progress_timeout() {
  Config config;
  config.progress_timeout_ms = 120;
  World world(3, Wire::pair, 1, config);
  Status status = receive_from(world[0], 2, 10);
  CHECK(status.code() == Code::timeout && ends_with(status, error_code::no_progress, label_of(2)));
  CHECK(status.message().find("rank 1") == std::string::npos);
  status = send_to(world[1], 2, 50'000'000);
  CHECK(status.code() == Code::timeout && ends_with(status, error_code::no_progress, label_of(2)));
}

// From now on the socket behaves as if its host had no link: what arrives is dropped before TCP sees it.
void cut_off(int fd) {
  sock_filter drop{BPF_RET | BPF_K, 0, 0, 0};
  const sock_fprog program{1, &drop};
  CHECK(setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof(program)) == 0);
}

void test_a_host_that_acknowledges_nothing() {
  Config config;
  config.unreachable_timeout_ms = 1'100;
  for (const bool sending : {false, true}) {  // something unacknowledged is on its way, or only the kernel's probes
    World world(3, Wire::tcp, 2, config);
    for (const int fd : world.peers[1][0].fds) cut_off(fd);
    for (const int fd : world.peers[0][1].fds) cut_off(fd);  // a link is down for both sides
    if (sending) CHECK_OK(send_to(world[0], 1, 10));
    in_ranks(2, [&](int rank) {
      // Rank 0 waits for rank 2, which is well and does nothing.
      const Status status = rank == 0 ? receive_from(world[0], 2, 10) : receive_from(world[1], 0, 10);
      CHECK(status.code() == Code::aborted);
      CHECK(ends_with(status, error_code::peer_lost, label_of(1 - rank), " 1 s (HOROVOD_UNREACHABLE_TIMEOUT_SECONDS)"));
    });
  }
  // A process that takes nothing is another matter: its host answers for it, however long.
  config.progress_timeout_ms = 2'500;
  World world(2, Wire::tcp, 1, config);
  const Status status = send_to(world[0], 1, 50'000'000);
  CHECK(status.code() == Code::timeout && ends_with(status, error_code::no_progress, label_of(1)));
}

// A peer played by hand: whatever it writes, the answer is a sentence with its name.
void test_hostile_bytes() {
  using wire::FrameHeader;
  const auto header = [](auto change) {
    FrameHeader made;
    made.sender = 1;
    made.epoch = 7;
    made.length = 100;
    change(made);
    std::string bytes(reinterpret_cast<const char*>(&made), sizeof(made));
    return bytes.append(100, 'x');
  };
  struct Case {
    std::string bytes;
    std::string fact;  // beside the name
    ErrorCode code = error_code::unexpected_data;
  };
  const std::vector<Case> cases = {
      {std::string(64, 'G'), ""},
      {header([](FrameHeader& h) { h.epoch = 8; }), "world 8"},
      {header([](FrameHeader& h) { h.sender = 0; }), "rank 0"},
      {header([](FrameHeader& h) { h.length = 99; }), "99 bytes of transfer 0"},
      {header([](FrameHeader& h) { h.sequence = 1; }), "100 bytes of transfer 1"},
      {header([](FrameHeader& h) { h.length = 0; }), " 0 bytes"},
      {header([](FrameHeader& h) { h.length = ~uint64_t{0}; }), " 18446744073709551615 bytes"},
      {header([](FrameHeader& h) { h.kind = 10; }), "kind 10"},
      {header([](FrameHeader& h) { h.kind = 3, h.length = uint64_t{1} << 40; }), " 1099511627776 bytes"},
      {header([](FrameHeader& h) { h.kind = 3, h.length = 3; }), " 3 bytes"},
      {header([](FrameHeader& h) { h.kind = 3; }), " 2021161080 ids"},
      {header([](FrameHeader& h) { h.kind = 3, h.sequence = 2; }), "frame 2"},
      {header([](FrameHeader&) {}).substr(0, 70), "", error_code::peer_lost},  // truncated
      {header([](FrameHeader&) {}).substr(0, 20), "", error_code::peer_lost},
      {"", "", error_code::peer_lost},
  };
  for (const Case& hostile : cases) {
    int fds[2];
    connect_pair(Wire::pair, fds);
    AbortSignal abort;
    Status status;
    auto mesh = Mesh::create(0, 7, {{label_of(0), {}}, {label_of(1), {fds[0]}}}, Config{}, abort, status);
    CHECK_OK(status);
    CHECK(write(fds[1], hostile.bytes.data(), hostile.bytes.size()) == static_cast<ssize_t>(hostile.bytes.size()));
    close(fds[1]);
    status = receive_from(*mesh, 1, 100);
    CHECK(status.code() == Code::aborted);
    CHECK(ends_with(status, hostile.code, label_of(1), hostile.fact));
  }
  // A connection that ends at every byte of a good stream of a control frame and a data frame.
  World world(2);
  const auto good = [&] {
    int fds[2];
    connect_pair(Wire::pair, fds);
    AbortSignal abort;
    Status status;
    auto mesh = Mesh::create(1, 7, {{label_of(0), {fds[0]}}, {label_of(1), {}}}, Config{}, abort, status);
    const uint32_t id = 3;
    CHECK_OK(mesh->send_control(0, ControlKind::ready, {&id, 1}, "t"));
    CHECK_OK(send_to(*mesh, 0, 50));
    std::string bytes(1000, 0);
    bytes.resize(static_cast<size_t>(read(fds[1], bytes.data(), bytes.size())));
    close(fds[1]);
    return bytes;
  }();
  for (size_t cut = 0; cut <= good.size(); ++cut) {
    int fds[2];
    connect_pair(Wire::pair, fds);
    AbortSignal abort;
    Status status;
    auto mesh = Mesh::create(0, 7, {{label_of(0), {}}, {label_of(1), {fds[0]}}}, Config{}, abort, status);
    CHECK(write(fds[1], good.data(), cut) == static_cast<ssize_t>(cut));
    close(fds[1]);
    status = receive_from(*mesh, 1, 50);
    CHECK(status.ok() == (cut == good.size()));
    if (!status.ok()) CHECK(ends_with(status, error_code::peer_lost, label_of(1)));
  }
}

// What is left to read, without what a writer sends later; `ended` tells whether the stream is over behind it.
std::string drained(int fd, bool& ended) {
  std::string bytes;
  char part[4096];
  ssize_t size = 0;
  while ((size = recv(fd, part, sizeof(part), MSG_DONTWAIT)) > 0) bytes.append(part, static_cast<size_t>(size));
  ended = size == 0;
  return bytes;
}

void test_connections_that_are_kept() {
  Config config;
  config.keeps_connections = true;
  {
    World world(2, Wire::pair, 1, config);
    Flight flight;
    std::vector<uint8_t> out(3'000'000);
    const Transfer send{1, {{out.data(), out.size()}}};
    CHECK_OK(world[0].start({&send, 1}, {}, flight));  // more than the socket takes
    world[1].announce_end(ControlKind::abort, "the reason");
    CHECK(contains(wait_for_news(world[0]).message(), "the reason"));
    world[0].announce_end(ControlKind::abort,
                          "the reason");  // in the middle of the frame, which the peer needs no more
    std::vector<KeptSocket> one = world[0].hand_over(true), other = world[1].hand_over(true);
    CHECK(one.size() == 1 && one[0].peer == 1 && other.size() == 1 && other[0].peer == 0);
    world[0].announce_end(ControlKind::abort, "too late");  // news of the coordinator may still come to the engine
    CHECK(world[0].hand_over(true).empty());
    world.meshes.clear();
    bool ended = true;
    (void)drained(other[0].socket.fd(), ended);
    CHECK(!ended);
    CHECK(write(one[0].socket.fd(), "next", 4) == 4);
    CHECK(drained(other[0].socket.fd(), ended) == "next" && !ended);
  }
  {  // bytes wait that the peer may need
    World world(2, Wire::pair, 1, config);
    Flight flight;
    std::vector<uint8_t> out(3'000'000);
    const Transfer send{1, {{out.data(), out.size()}}};
    CHECK_OK(world[0].start({&send, 1}, {}, flight));
    world.aborts[0].raise({Code::aborted, "the reason"});
    world[0].announce_end(ControlKind::abort, "the reason");
    world[0].linger(1'000);
    CHECK(world[0].hand_over(true).empty());
    world.meshes[0].reset();
    CHECK(ends_with(wait_for_news(world[1]), error_code::peer_lost, label_of(0)));
  }
  for (const auto& [connections, keep] : {std::pair{1, false}, {3, true}}) {
    World world(2, Wire::pair, connections, config);
    std::vector<int> ends;
    for (const int fd : world.peers[1][0].fds) ends.push_back(dup(fd));
    world[0].announce_end(ControlKind::leave, "it goes");
    CHECK(world[0].hand_over(keep).empty());
    for (const int fd : ends) {
      bool ended = false;
      (void)drained(fd, ended);
      CHECK(ended);
      close(fd);
    }
  }
  {  // lost
    World world(2, Wire::pair, 1, config);
    world.meshes[1].reset();
    CHECK(!wait_for_news(world[0]).ok());
    CHECK(world[0].hand_over(true).empty());
  }
}

const NamedTest kTests[] = {
    {"lost_peer", test_lost_peer},
    {"lost_behind_data_that_nobody_expects", test_lost_behind_data_that_nobody_expects},
    {"abort_frame_is_the_cause", test_abort_frame_is_the_cause},
    {"leave", test_leave},
    {"progress_timeout", test_progress_timeout},
    {"a_host_that_acknowledges_nothing", test_a_host_that_acknowledges_nothing},
    {"hostile_bytes", test_hostile_bytes},
    {"connections_that_are_kept", test_connections_that_are_kept},
};

}  // namespace

int main(int argc, char** argv) { return run_named(argc, argv, kTests); }
