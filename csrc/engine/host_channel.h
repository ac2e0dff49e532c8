// What the members of a host tell each other about the order log, through the memory that they share: each member has a
// ring of messages in its own area. The leader (the first member) reads those of the others, the others read the
// leader's.
//
//   plain, brings   member -> leader    it has arrived at `id`; with its small data, or without
//   withdraw        member -> leader    it wants the arrival back; answered by `withdrawn`, or by the id's batch
//   batch           leader -> members   the ids of a batch, to be run by everybody
//   done            leader -> members   the result of `id`, which needs nothing else
//   withdrawn       leader -> `member`  the answer
//   closed          leader -> members   nothing more is agreed; the text says why
//
// `written` counts the bytes that were ever written and is stored by the ring's owner after them (release), a reader's
// cursor counts those that the reader needs no more. Both only grow, and the writer stays within kBytes of the slowest
// cursor. A message that does not fit waits with its writer, which sets `starved`; the reader that makes room clears it
// and wakes the writer. A message never lies across the ring's end: `skip` fills what is left there.
//
// A reader checks all that it reads, so that a broken rank ends the epoch with a sentence and does not crash the
// others. It copies a header before it reads it, and its users copy a payload before they read it: what the writer
// changes meanwhile can't be seen in two states. That is no defence against an attacker: see docs/fuzzing.md.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"

namespace horovod {

struct HostMessage {
  enum Kind : uint32_t { skip, plain, brings, withdraw, batch, done, withdrawn, closed };
  Kind kind = skip;
  uint32_t id = 0;
  uint32_t member = 0;  // its place on the host
  uint32_t length = 0;  // bytes that follow
};
static_assert(sizeof(HostMessage) == 16);

// What lies in the area of each member.
struct HostMemory {
  static constexpr size_t kBytes = 256u << 10;  // several of the largest messages
  struct alignas(64) Word {
    std::atomic<uint64_t> value;
  };
  Word written;
  Word starved;
  Word taken;   // the leader's cursor in this ring
  Word heard;   // the owner's cursor in the leader's ring
  Word asleep;  // leader only: not 0 while it sleeps and only the mesh can wake it (Mesh::PollSource)
  alignas(64) std::byte ring[kBytes];
};

// Writes to a ring. Not thread-safe: its owner uses it with a lock that it names.
class HostWriter {
 public:
  HostWriter(HostMemory& memory, std::vector<const std::atomic<uint64_t>*> readers)
      : memory_(memory), readers_(std::move(readers)) {}

  // fill(bytes) writes the payload.
  template <typename Fill>
  void send(const HostMessage& message, Fill&& fill) {
    std::byte* to = backlog_.empty() ? claim(message.length) : nullptr;
    if (!to) {
      std::string& kept = backlog_.emplace_back(sizeof(message) + message.length, '\0');
      to = reinterpret_cast<std::byte*>(kept.data());
    }
    std::memcpy(to, &message, sizeof(message));
    if (message.length > 0) fill(to + sizeof(message));
    if (backlog_.empty()) {
      publish(message.length);
    } else {
      (void)flush();
    }
  }

  // Writes messages that wait for room. False: some still wait.
  bool flush();
  bool starving() const { return !backlog_.empty(); }

 private:
  std::byte* claim(uint32_t length);
  void publish(uint32_t length);

  HostMemory& memory_;
  const std::vector<const std::atomic<uint64_t>*> readers_;
  uint64_t written_ = 0;
  uint64_t limit_ = HostMemory::kBytes;  // the slowest reader's cursor plus kBytes, when last looked at
  std::deque<std::string> backlog_;
};

// Reads a ring. Used only by the driver of the member that reads.
class HostReader {
 public:
  // label: names the rank that writes, in error messages.
  HostReader(HostMemory& memory, std::atomic<uint64_t>& cursor, std::string label)
      : memory_(&memory), cursor_(&cursor), label_(std::move(label)) {}

  bool news() const { return memory_->written.value.load() != read_; }

  // The next message and its payload, which stays until consume(); false when there is none.
  Status peek(HostMessage& message, std::string_view& payload, bool& found);
  // Says that the message of peek() is not needed any more. True: its writer waits for room and is to be woken.
  bool consume();

 private:
  Status bad(const std::string& what) const;

  HostMemory* memory_;
  std::atomic<uint64_t>* cursor_;
  std::string label_;
  uint64_t read_ = 0;
  uint64_t next_ = 0;  // where the message of peek() ends
};

}  // namespace horovod
