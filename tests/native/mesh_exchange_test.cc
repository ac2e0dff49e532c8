// What the TCP data plane moves while all is well: data between everybody, control frames between the data, wake-ups;
// and that it takes and gives back its descriptors.
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "check.h"
#include "engine/order_log.h"
#include "mesh_world.h"
#include "named_tests.h"

using namespace horovod;
using namespace horovod::testing;

namespace {

// Everybody sends much to everybody at once while other threads send control frames: no deadlock, nothing mixed up.
void test_exchange_with_control_frames() {
  for (const int connections : {1, 3}) {
    constexpr int n = 4;
    constexpr size_t kBytes = 3'000'001;
    constexpr uint32_t kFrames = 300;
    World world(n, Wire::tcp, connections);
    in_ranks(n, [&](int rank) {
      std::thread talker([&] {
        for (uint32_t i = 0; i < kFrames; ++i) {
          const uint32_t ids[3] = {i, i + 1, i + 2};
          CHECK_OK(world[rank].send_control((rank + 1) % n, ControlKind::ready, ids));
          CHECK_OK(world[rank].send_control((rank + 2) % n, ControlKind::withdraw, {&i, 1}, "text"));
        }
      });
      std::vector<std::vector<uint8_t>> out(n), in(n);
      std::vector<Transfer> sends, receives;
      for (int p = 0; p < n; ++p) {
        if (p == rank) continue;
        out[p].resize(kBytes);
        in[p].resize(kBytes);
        for (size_t i = 0; i < kBytes; ++i)
          out[p][i] = static_cast<uint8_t>(i * 31 + i / 999 + static_cast<size_t>(rank * n + p));
        sends.push_back({p, {{out[p].data(), 1000}, {out[p].data() + 1000, 0}, {out[p].data() + 1000, kBytes - 1000}}});
        receives.push_back({p, {{in[p].data(), kBytes - 5}, {in[p].data() + kBytes - 5, 5}}});
      }
      for (int round = 0; round < 3; ++round) {
        for (auto& buffer : in) std::fill(buffer.begin(), buffer.end(), 0);
        CHECK_OK(world[rank].exchange(sends, receives));
        for (int p = 0; p < n; ++p) {
          for (size_t i = 0; i < in[p].size(); ++i) {
            CHECK(in[p][i] == static_cast<uint8_t>(i * 31 + i / 999 + static_cast<size_t>(p * n + rank)));
          }
        }
      }
      uint32_t ready = 0, withdraw = 0;
      while (ready < kFrames || withdraw < kFrames) {
        ControlFrame frame;
        bool found = false;
        CHECK_OK(world[rank].next_control(frame, found));
        if (!found) {
          CHECK_OK(world[rank].wait(1'000'000));
          continue;
        }
        if (frame.kind == ControlKind::ready) {
          CHECK(frame.peer == (rank + n - 1) % n && frame.ids == (std::vector<uint32_t>{ready, ready + 1, ready + 2}));
          ++ready;
        } else {
          CHECK(frame.peer == (rank + n - 2) % n && frame.ids == std::vector<uint32_t>{withdraw} &&
                frame.text == "text");
          ++withdraw;
        }
      }
      talker.join();
    });
  }
}

// A peer that is ahead: its data waits until the receive is started, and control frames behind it are not lost.
void test_early_data() {
  World world(3);
  std::vector<uint8_t> out(5'000), in(5'000), more(200'000, 9), much(200'000);
  for (size_t i = 0; i < out.size(); ++i) out[i] = static_cast<uint8_t>(i);
  Flight early;
  const Transfer send{0, {{out.data(), out.size()}}}, send_more{0, {{more.data(), more.size()}}};
  CHECK_OK(world[1].start({&send, 1}, {}, early));
  const uint32_t id = 5;
  CHECK_OK(world[1].send_control(0, ControlKind::ready, {&id, 1}));
  CHECK_OK(world[1].start({&send_more, 1}, {}, early));
  CHECK_OK(world[0].wait(1000));
  const Transfer receive{1, {{in.data(), in.size()}}}, receive_more{1, {{much.data(), much.size()}}};
  std::thread sender([&] { CHECK_OK(world[1].finish(early)); });
  CHECK_OK(world[0].exchange({}, {&receive, 1}));
  CHECK(in == out);
  CHECK_OK(world[0].exchange({}, {&receive_more, 1}));
  CHECK(much == more);
  sender.join();
  ControlFrame frame;
  bool found = false;
  CHECK_OK(world[0].next_control(frame, found));
  CHECK(found && frame.peer == 1 && frame.ids == std::vector<uint32_t>{5});
}

void test_wake() {
  World world(2);
  std::thread waker([&] { world[0].wake(); });
  CHECK_OK(world[0].wait(60'000'000));
  waker.join();
  world[0].wake();  // remembered, also across an exchange
  uint8_t out = 1, in = 0;
  const Transfer send{1, {{&out, 1}}}, receive{1, {{&in, 1}}};
  std::thread peer([&] {
    uint8_t theirs = 0;
    const Transfer back{0, {{&out, 1}}}, into{0, {{&theirs, 1}}};
    CHECK_OK(world[1].exchange({&back, 1}, {&into, 1}));
  });
  CHECK_OK(world[0].exchange({&send, 1}, {&receive, 1}));
  peer.join();
  CHECK_OK(world[0].wait(60'000'000));
}

// A full socket blocks no caller of send_control; the driver sends the rest when there is room.
void test_control_on_a_full_socket() {
  World world(2);
  std::vector<uint32_t> ids(kMaxIds);
  for (uint32_t i = 0; i < kMaxIds; ++i) ids[i] = i;
  constexpr int kFrames = 100;  // 6.5 MB, more than any socket takes
  for (int i = 0; i < kFrames; ++i) CHECK_OK(world[0].send_control(1, ControlKind::batch, ids));
  std::atomic<bool> done{false};
  std::thread driver([&] {
    while (!done) CHECK_OK(world[0].wait(10'000));
  });
  for (int i = 0; i < kFrames;) {
    ControlFrame frame;
    bool found = false;
    CHECK_OK(world[1].next_control(frame, found));
    if (!found) {
      CHECK_OK(world[1].wait(1'000'000));
      continue;
    }
    CHECK(frame.ids == ids);
    ++i;
  }
  done = true;
  world[0].wake();
  driver.join();
}

void test_descriptors() {
  const auto count = [] {
    int open = 0;
    for (int fd = 0; fd < 1024; ++fd) open += fcntl(fd, F_GETFD) >= 0;
    return open;
  };
  const int before = count();
  {
    World world(3, Wire::tcp, 2);
    const std::vector<int> fds = world.peers[0][1].fds;
    for (const int fd : fds) CHECK(fcntl(fd, F_GETFD) & FD_CLOEXEC);
    const pid_t child = fork();
    if (child == 0) {
      const bool gone = fcntl(fds[0], F_GETFD) < 0 && fcntl(fds[1], F_GETFD) < 0;
      const int reused = dup(1);
      world.meshes.clear();  // harmless: touches nothing that was opened since
      _exit(gone && fcntl(reused, F_GETFD) >= 0 ? 0 : 1);
    }
    int result = 0;
    CHECK(waitpid(child, &result, 0) == child && WIFEXITED(result) && WEXITSTATUS(result) == 0);
    std::thread peer([&] { CHECK_OK(send_to(world[1], 0, 1000)); });  // here everything still works
    CHECK_OK(receive_from(world[0], 1, 1000));
    peer.join();
  }
  CHECK(count() == before);
  // What is no stream socket is refused, and closed.
  int fds[2];
  CHECK(pipe(fds) == 0);
  AbortSignal abort;
  Status status;
  CHECK(!Mesh::create(0, 7, {{"me", {}}, {"them", {fds[0], fds[1]}}}, Config{}, abort, status));
  CHECK(status.code() == Code::invalid_argument && ends_with(status, error_code::internal, "them"));
  CHECK(!Mesh::create(0, 7, {{"me", {}}, {"them", {}}}, Config{}, abort, status) &&
        ends_with(status, error_code::internal, "them"));
  CHECK(count() == before);
}

const NamedTest kTests[] = {
    {"exchange_with_control_frames", test_exchange_with_control_frames},
    {"early_data", test_early_data},
    {"wake", test_wake},
    {"control_on_a_full_socket", test_control_on_a_full_socket},
    {"descriptors", test_descriptors},
};

}  // namespace

int main(int argc, char** argv) { return run_named(argc, argv, kTests); }
