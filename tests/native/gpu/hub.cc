#include "hub.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <thread>

#include "arithmetic.h"

namespace standin {
namespace {

constexpr int kNobodyComesMs = 60'000;

sockaddr_un address_of(const std::string& name, socklen_t& length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;  // abstract: begins with a zero and leaves no file
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

// Until the socket is ready; false when `wake` is set first.
bool ready(int socket, int wake, short what) {
  pollfd watched[] = {{socket, what, 0}, {wake, POLLIN, 0}};
  while (::poll(watched, wake < 0 ? 1 : 2, -1) < 0) {
    if (errno != EINTR) return false;
  }
  return wake < 0 || watched[1].revents == 0;
}

bool move(int socket, int wake, char* data, size_t bytes, bool reading) {
  while (bytes > 0) {
    if (!ready(socket, wake, reading ? POLLIN : POLLOUT)) return false;
    const ssize_t moved =
        reading ? ::recv(socket, data, bytes, MSG_DONTWAIT) : ::send(socket, data, bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (moved < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (moved <= 0) return false;
    data += moved;
    bytes -= static_cast<size_t>(moved);
  }
  return true;
}

struct Message {
  Header header;
  std::vector<char> data;
};

// One rank's connection. What goes out has a thread of its own, so that a rank which sends for long does not stop
// others.
struct Line {
  int socket = -1;
  std::mutex mutex;  // guards the two below
  std::condition_variable changed;
  std::deque<Message> outgoing;
  bool ended = false;

  ~Line() { ::close(socket); }

  void answer(Header header, std::vector<char> data) {
    header.bytes = data.size();
    {
      const std::lock_guard<std::mutex> lock(mutex);
      outgoing.push_back({header, std::move(data)});
    }
    changed.notify_one();
  }
  void end() {
    {
      const std::lock_guard<std::mutex> lock(mutex);
      ended = true;
    }
    changed.notify_one();
    ::shutdown(socket, SHUT_RDWR);
  }
  void write() {
    for (;;) {
      Message next;
      {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [&] { return ended || !outgoing.empty(); });
        if (ended) return;
        next = std::move(outgoing.front());
        outgoing.pop_front();
      }
      if (!write_message(socket, -1, next.header, next.data.data())) return;
    }
  }
};

struct Hub : std::enable_shared_from_this<Hub> {
  std::mutex mutex;  // guards everything below
  int ranks = 0;
  std::map<int, std::shared_ptr<Line>> lines;
  std::map<int, uint64_t> begun;                                    // collectives of each rank
  std::map<uint64_t, std::map<int, Message>> waiting;               // by number and rank
  std::map<std::pair<int, int>, std::deque<Message>> sent, wanted;  // by sender and receiver
  bool failed = false;

  void accept_all(int listener) {
    for (int come = 0, all = 1; come < all;) {
      pollfd door{listener, POLLIN, 0};
      if (::poll(&door, 1, kNobodyComesMs) <= 0) break;
      auto line = std::make_shared<Line>();
      line->socket = ::accept(listener, nullptr, nullptr);
      Message hello;
      if (line->socket < 0 || !read_message(line->socket, -1, hello.header, hello.data)) continue;
      ++come;
      all = hello.header.ranks;
      std::thread([line] { line->write(); }).detach();
      join(hello.header.rank, all, line);
      std::thread([self = shared_from_this(), rank = hello.header.rank, line] { self->read(rank, *line); }).detach();
    }
    ::close(listener);
  }

  void join(int rank, int all, const std::shared_ptr<Line>& line) {
    const std::lock_guard<std::mutex> lock(mutex);
    ranks = all;
    lines[rank] = line;
    if (static_cast<int>(lines.size()) < all) return;
    Header go;
    go.kind = kHello;
    for (const auto& [member, connected] : lines) connected->answer(go, {});
  }

  void read(int rank, Line& line) {
    Message message;
    while (read_message(line.socket, -1, message.header, message.data)) take(rank, std::move(message));
    line.end();
    const std::lock_guard<std::mutex> lock(mutex);
    lines.erase(rank);
    Header gone;
    gone.failed = gone.lost = 1;
    const std::string sentence = "rank " + std::to_string(rank) + " is gone";
    for (const auto& [member, connected] : lines) connected->answer(gone, {sentence.begin(), sentence.end()});
  }

  void take(int rank, Message message) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (message.header.kind == kSend || message.header.kind == kReceive) return match(rank, std::move(message));
    const uint64_t number = begun[rank]++;
    std::map<int, Message>& here = waiting[number];
    here.emplace(rank, std::move(message));
    if (static_cast<int>(here.size()) < ranks) return;
    compute(here);
    waiting.erase(number);
  }

  void match(int rank, Message message) {
    const bool sends = message.header.kind == kSend;
    const int other = message.header.rank;
    const std::pair<int, int> way = sends ? std::pair{rank, other} : std::pair{other, rank};
    (sends ? sent : wanted)[way].push_back(std::move(message));
    if (sent[way].empty() || wanted[way].empty()) return;
    Message from = std::move(sent[way].front()), to = std::move(wanted[way].front());
    sent[way].pop_front();
    wanted[way].pop_front();
    if (from.header.count != to.header.count || from.header.type != to.header.type) {
      return fail("rank " + std::to_string(way.first) + " sends " + std::to_string(from.header.count) +
                  " elements to rank " + std::to_string(way.second) + ", which expects " +
                  std::to_string(to.header.count));
    }
    Header answer = to.header;
    answer.rank = way.first;
    if (const auto line = lines.find(way.second); line != lines.end())
      line->second->answer(answer, std::move(from.data));
  }

  void fail(const std::string& sentence) {
    failed = true;
    Header answer;
    answer.failed = 1;
    for (const auto& [member, line] : lines) line->answer(answer, {sentence.begin(), sentence.end()});
  }

  static std::string in_words(const Header& header) {
    return std::string(name_of(header.kind)) + " of " + std::to_string(header.count) + " elements of type " +
           std::to_string(header.type) + " with operation " + std::to_string(header.op) + " and root " +
           std::to_string(header.root);
  }

  void compute(std::map<int, Message>& parts) {
    const Header head = parts.begin()->second.header;
    for (const auto& [rank, part] : parts) {
      if (in_words(part.header) != in_words(head)) {
        return fail("rank " + std::to_string(parts.begin()->first) + " calls " + in_words(head) + ", but rank " +
                    std::to_string(rank) + " calls " + in_words(part.header));
      }
    }
    if (failed) return;
    std::vector<char> total;
    if (head.kind == kAllGather) {
      for (const auto& [rank, part] : parts) total.insert(total.end(), part.data.begin(), part.data.end());
    } else if (head.kind == kBroadcast) {
      total = std::move(parts[head.root].data);
    } else {
      for (const auto& [rank, part] : parts) {
        if (total.empty()) {
          total = part.data;
        } else {
          combine(head.type, head.op, total.data(), part.data.data(), total.size() / bytes_of(head.type));
        }
      }
      if (head.op == kAverage) divide_integers(head.type, total.data(), total.size() / bytes_of(head.type), ranks);
    }
    for (const auto& [rank, line] : lines) {
      std::vector<char> result;
      if (head.kind == kReduceScatter) {
        const size_t share = total.size() / static_cast<size_t>(ranks);
        result.assign(total.begin() + static_cast<ptrdiff_t>(share) * rank,
                      total.begin() + static_cast<ptrdiff_t>(share) * (rank + 1));
      } else if (head.kind != kReduce || head.root == rank) {
        result = total;
      }
      line->answer(head, std::move(result));
    }
  }
};

}  // namespace

bool write_message(int socket, int wake, Header header, const void* data) {
  return move(socket, wake, reinterpret_cast<char*>(&header), sizeof header, false) &&
         move(socket, wake, static_cast<char*>(const_cast<void*>(data)), header.bytes, false);
}

bool read_message(int socket, int wake, Header& header, std::vector<char>& data) {
  if (!move(socket, wake, reinterpret_cast<char*>(&header), sizeof header, true)) return false;
  data.resize(header.bytes);
  return move(socket, wake, data.data(), data.size(), true);
}

std::string start_hub() {
  std::random_device random;
  std::string name = "standin-nccl-" + std::to_string(::getpid());
  for (int i = 0; i < 3; ++i) name.append("-").append(std::to_string(random()));
  const int listener = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  socklen_t length = 0;
  const sockaddr_un address = address_of(name, length);
  if (listener < 0 || ::bind(listener, reinterpret_cast<const sockaddr*>(&address), length) != 0 ||
      ::listen(listener, 64) != 0) {
    return "";
  }
  std::thread([hub = std::make_shared<Hub>(), listener] { hub->accept_all(listener); }).detach();
  return name;
}

int connect_to_hub(const std::string& name) {
  const int socket = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  socklen_t length = 0;
  const sockaddr_un address = address_of(name, length);
  if (::connect(socket, reinterpret_cast<const sockaddr*>(&address), length) == 0) return socket;
  ::close(socket);
  return -1;
}

}  // namespace standin
