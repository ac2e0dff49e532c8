// What the kernel's sockets allow: the allreduce of float32 that somebody would write who has nothing else to care for.
// No thread but the caller's, no agreement on what comes next, no fusion, no failure that is told, no check of a peer.
// peers/sockets.py compiles and calls it, as the library `sockets` of network.py.
//
// Up to 16 KB everybody sends everything to everybody. Beyond that slice j goes to rank j, which adds it up and sends
// the sum to all: the least that can be sent. A piece is added as soon as it has come.
//
// Where a host has several ranks they share memory, and only what has been added up on a host leaves it.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
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

// sockets[r] is connected to rank r; scratch has room for n times the data. False when a connection has ended.
bool exchange(int n, int rank, const int* sockets, float* data, float* scratch, size_t count, bool crowded) {
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
  if (!run(moves, crowded, add_one)) return false;
  if (small) return true;
  moves.clear();
  from.clear();
  for (int i = 1; i < n; ++i) {
    const int peer = (rank + i) % n;
    move(peer, mine, length(rank), true);
    move(peer, data + begin(peer), length(peer), false);
  }
  return run(moves, crowded, [](size_t) {});
}

// What the ranks of a host share, zeros at first. `step` of a rank is written by that rank alone (release, behind what
// it has written to its places) and read by the others (acquire, before they read those).
struct alignas(64) Step {
  std::atomic<uint64_t> value;
};

class Shared {
 public:
  Shared(void* memory, int ranks, int rank, bool crowded)
      : steps_(static_cast<Step*>(memory)), ranks_(ranks), rank_(rank), crowded_(crowded) {}
  // Of each rank: what others add up for it, and what it has added up for others.
  float* place(int rank, bool result) const {
    return reinterpret_cast<float*>(reinterpret_cast<char*>(steps_ + ranks_)) +
           (static_cast<size_t>(rank) * 2 + (result ? 1 : 0)) * kPlaceElements;
  }
  void meet() const {
    const uint64_t now = steps_[rank_].value.load(std::memory_order_relaxed) + 1;
    steps_[rank_].value.store(now, std::memory_order_release);
    for (int i = 0; i < ranks_; ++i) {
      while (steps_[i].value.load(std::memory_order_acquire) < now) {
        if (crowded_) sched_yield();
      }
    }
  }
  static constexpr size_t kPlaceElements = size_t{1} << 18;

 private:
  Step* steps_;
  int ranks_;
  int rank_;
  bool crowded_;
};

}  // namespace

extern "C" size_t plain_shared_bytes(int per_host) {
  return static_cast<size_t>(per_host) * (sizeof(Step) + 2 * Shared::kPlaceElements * sizeof(float));
}

// counterparts[h] is connected to the rank of host h that has this rank's number there; shared is plain_shared_bytes of
// memory, of no use where each host has one rank; scratch has room for as many times the data as there are hosts. 0, or
// 1 when a connection has ended.
extern "C" int plain_allreduce(int hosts, int per_host, int rank, const int* counterparts, void* shared, float* data,
                               float* scratch, size_t count, int crowded) {
  const int host = rank / per_host;
  const int me = rank % per_host;
  if (per_host == 1) return exchange(hosts, host, counterparts, data, scratch, count, crowded != 0) ? 0 : 1;
  const Shared memory(shared, per_host, me, crowded != 0);
  for (size_t done = 0; done < count; done += Shared::kPlaceElements) {
    float* const values = data + done;
    const size_t here = std::min(count - done, Shared::kPlaceElements);
    // Small data is worth one rank's exchange only.
    const size_t part = here * sizeof(float) <= kSmallBytes ? here : (here + per_host - 1) / per_host;
    const auto begin = [&](int r) { return std::min(part * static_cast<size_t>(r), here); };
    const auto length = [&](int r) { return std::min(part, here - begin(r)); };
    const auto copy = [](float* to, const float* from, size_t elements) {
      std::memcpy(to, from, elements * sizeof(float));
    };
    for (int r = 0; r < per_host; ++r) {
      if (r != me) copy(memory.place(me, false) + begin(r), values + begin(r), length(r));
    }
    memory.meet();
    for (int r = 0; r < per_host; ++r) {
      if (r != me) add(values + begin(me), memory.place(r, false) + begin(me), length(me));
    }
    if (length(me) > 0 && !exchange(hosts, host, counterparts, values + begin(me), scratch, length(me), crowded != 0)) {
      return 1;
    }
    copy(memory.place(me, true), values + begin(me), length(me));
    memory.meet();
    for (int r = 0; r < per_host; ++r) {
      if (r != me) copy(values + begin(r), memory.place(r, true), length(r));
    }
  }
  return 0;
}
