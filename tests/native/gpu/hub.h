// The network of the stand-in of NCCL: one hub for each unique id, in the process that made the id, and a Unix socket
// from each rank to it. It compares what the ranks call, which the real one does not, and says when they differ.
//
// A collective comes as one message from each rank and is answered to each when the last has come; sends and receives
// are matched in their order between two ranks.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace standin {

enum Kind : uint32_t { kHello = 1, kAllReduce, kBroadcast, kReduce, kReduceScatter, kAllGather, kSend, kReceive };

inline const char* name_of(uint32_t kind) {
  constexpr const char* names[] = {"nothing",       "hello",     "AllReduce", "Broadcast", "Reduce",
                                   "ReduceScatter", "AllGather", "Send",      "Recv"};
  return names[kind <= kReceive ? kind : 0];
}

// Before each message, in both directions; `bytes` of data follow.
struct Header {
  uint32_t kind = 0;
  int32_t rank = 0;   // hello: of the sender; send, receive: the other one
  int32_t ranks = 0;  // hello
  int32_t type = 0;
  int32_t op = 0;
  int32_t root = 0;
  uint64_t count = 0;
  uint64_t bytes = 0;
  int32_t failed = 0;  // to a rank: the data is a sentence
  int32_t lost = 0;    // to a rank: another one is gone
};

// Starts a hub and gives the name of its socket. It ends when all who came have gone, or when nobody comes.
std::string start_hub();

// A socket that is connected to the hub, or -1.
int connect_to_hub(const std::string& name);

// False when the other side is gone or `wake` (an eventfd) is set. data: resized.
bool write_message(int socket, int wake, Header header, const void* data);
bool read_message(int socket, int wake, Header& header, std::vector<char>& data);

}  // namespace standin
