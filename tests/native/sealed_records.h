// What lies on a socket between two sealed streams, and what a reader makes of bytes that somebody has put there.
#pragma once

#include <unistd.h>

#include <cerrno>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "mesh_world.h"
#include "transport/sealed_stream.h"

namespace horovod::testing {

inline constexpr size_t kOverhead = 4 + crypto::kTagBytes;  // of a record

inline const crypto::Library& library() {
  Status status;
  const crypto::Library* found = crypto::library("", status);
  CHECK_OK(status);
  return *found;
}

// What a writer with the keys of rank 0 puts on the socket for these messages, one record each.
inline std::vector<std::string> records_of(const std::vector<std::string>& messages, bool hides) {
  int fds[2];
  connect_pair(Wire::pair, fds);
  wire::SealedStream writer(library(), keys_of(0, 1, 0), hides, 3);
  std::vector<std::string> records;
  for (const std::string& message : messages) {
    const iovec piece{const_cast<char*>(message.data()), message.size()};
    CHECK(writer.send(fds[0], &piece, 1) == static_cast<ssize_t>(message.size()) && !writer.waits());
    std::string record(message.size() + kOverhead, '\0');
    CHECK(read(fds[1], record.data(), record.size()) == static_cast<ssize_t>(record.size()));
    records.push_back(std::move(record));
  }
  close(fds[0]);
  close(fds[1]);
  return records;
}

struct Heard {
  std::string text;
  int error;  // 0: an orderly end
};

// What a reader with the keys of rank `rank` gets of these bytes.
inline Heard hear(const std::string& bytes, bool hides, int rank = 1, int connection = 0) {
  int fds[2];
  connect_pair(Wire::pair, fds);
  std::thread sender([&] {
    for (size_t at = 0; at < bytes.size();) {
      const ssize_t done = ::send(fds[0], bytes.data() + at, bytes.size() - at, MSG_NOSIGNAL);
      if (done < 0) break;  // the reader has given up
      at += static_cast<size_t>(done);
    }
    close(fds[0]);
  });
  wire::SealedStream reader(library(), keys_of(rank, 1 - rank, connection), hides, 3);
  Heard heard;
  for (;;) {
    char buffer[7];
    const iovec pieces[] = {{buffer, 3}, {buffer + 3, 4}};
    const ssize_t got = reader.receive(fds[1], pieces, 2);
    heard.error = got < 0 ? errno : 0;
    if (heard.error == EAGAIN) std::this_thread::yield();
    if (heard.error == EAGAIN) continue;
    if (got <= 0) break;
    heard.text.append(buffer, static_cast<size_t>(got));
  }
  close(fds[1]);
  sender.join();
  return heard;
}

inline std::string joined(const std::vector<std::string>& parts) {
  std::string text;
  for (const std::string& part : parts) text += part;
  return text;
}

}  // namespace horovod::testing
