// What the kernel's sockets allow: the allreduce of float32 that somebody would write who has nothing else to care for.
// No thread but the caller's, no agreement on what comes next, no fusion, no failure that is told, no check of a peer.
// peers/sockets.py compiles and calls it, as the library `sockets` of network.py.
//
// Up to 16 KB everybody sends everything to everybody. Beyond that slice j goes to rank j, which adds it up and sends
// the sum to all: the least that can be sent. A piece is added as soon as it has come.
#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <vector>

#include <sched.h>
#include <sys/socket.h>

namespace {

constexpr size_t kSmallBytes = 16 << 10;

struct Move {
  int socket;
  char* data;
  size_t left;
  bool out;
};

// Moves everything; false when a connection ends. moved(index) is called when a move has ended.
template <typename Moved>
bool run(std::vector<Move>& moves, bool crowded, Moved&& moved) {
  size_t open = 0;
  for (const Move& move : moves) open += move.left > 0;
  while (open > 0) {
    bool progress = false;
    for (size_t i = 0; i < moves.size(); ++i) {
      Move& move = moves[i];
      if (move.left == 0) continue;
      const ssize_t bytes = move.out ? send(move.socket, move.data, move.left, MSG_DONTWAIT | MSG_NOSIGNAL)
                                     : recv(move.socket, move.data, move.left, MSG_DONTWAIT);
      if (bytes < 0 && (errno == EAGAIN || errno == EINTR)) continue;
      if (bytes <= 0) return false;
      progress = true;
      move.data += bytes;
      move.left -= static_cast<size_t>(bytes);
      if (move.left > 0) continue;
      --open;
      moved(i);
    }
    if (!progress && crowded) sched_yield();
  }
  return true;
}

void add(float* __restrict sum, const float* __restrict value, size_t count) {
  for (size_t i = 0; i < count; ++i) sum[i] += value[i];
}

}  // namespace

// sockets[r] is connected to rank r; scratch has room for n times the data. 0, or 1 when a connection has ended.
extern "C" int plain_allreduce(int n, int rank, const int* sockets, float* data, float* scratch, size_t count,
                               int crowded) {
  std::vector<Move> moves;
  std::vector<float*> from;  // of each move in: where its values are
  const auto bytes = [](size_t elements) { return elements * sizeof(float); };
  const auto move = [&](int peer, float* values, size_t elements, bool out) {
    moves.push_back({sockets[peer], reinterpret_cast<char*>(values), bytes(elements), out});
    from.push_back(values);
  };
  const bool small = bytes(count) <= kSmallBytes;
  const size_t part = small ? count : (count + static_cast<size_t>(n) - 1) / static_cast<size_t>(n);
  const auto begin = [&](int r) { return small ? 0 : std::min(part * static_cast<size_t>(r), count); };
  const auto length = [&](int r) { return small ? count : std::min(part, count - begin(r)); };
  float* mine = data + begin(rank);
  if (small) {  // what is sent is being added to meanwhile
    std::memcpy(scratch + count * static_cast<size_t>(rank), data, bytes(count));
  }
  for (int i = 1; i < n; ++i) {
    const int peer = (rank + i) % n;
    move(peer, small ? scratch + count * static_cast<size_t>(rank) : data + begin(peer), length(peer), true);
    move(peer, scratch + part * static_cast<size_t>(peer), length(rank), false);
  }
  const auto add_one = [&](size_t index) {
    if (!moves[index].out) add(mine, from[index], length(rank));
  };
  if (!run(moves, crowded != 0, add_one)) return 1;
  if (small) return 0;
  moves.clear();
  from.clear();
  for (int i = 1; i < n; ++i) {
    const int peer = (rank + i) % n;
    move(peer, mine, length(rank), true);
    move(peer, data + begin(peer), length(peer), false);
  }
  return run(moves, crowded != 0, [](size_t) {}) ? 0 : 1;
}
