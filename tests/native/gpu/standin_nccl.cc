// A stand-in for the part of NCCL that the engine calls: real ranks (processes or threads) that meet over Unix sockets,
// calls that run in stream order, communicators that never block the host where they are asked not to.
//
// Where ranks call different things the real one hangs; this one says so as an asynchronous error, and hangs as well
// until the communicator is aborted. A rank that is gone is waited for like the real one does within a host, or told as
// ncclRemoteError after standin_nccl_remote_errors(1), or where STANDIN_NCCL_REMOTE_ERRORS is set. Pointers must be
// memory of the communicator's device.
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>
#include <algorithm>
#include <chrono>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "arithmetic.h"
#include "faults.h"
#include "hub.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

extern "C" {
int cuCtxGetDevice(int* device);
int cuLaunchHostFunc(void* stream, void (*function)(void*), void* data);
int standin_cuda_holds(const void* address, size_t bytes, int device);
int standin_cuda_device_of(void* stream);
}

namespace {

using standin::Header;

enum Result : int {
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7
};

struct UniqueId {
  char bytes[128];
};

struct Config {
  size_t size;
  unsigned magic, version;
  int blocking;
};

struct Comm;

struct Call {
  Comm* comm = nullptr;
  Header header;
  const void* input = nullptr;
  void* output = nullptr;
  void* stream = nullptr;
  std::vector<char> factor;  // of each element before it is reduced
};

struct Comm {
  int rank = 0, ranks = 0, device = -1;
  bool blocking = true;
  std::string hub;
  int socket = -1;
  const int wake = ::eventfd(0, EFD_CLOEXEC);  // set by an abort
  std::atomic<int> state{kSuccess};            // what ncclCommGetAsyncError answers
  std::mutex mutex;                            // guards everything below
  std::condition_variable changed;
  std::string last_error;
  int queued = 0;  // tasks on streams
  bool finalized = false;
  std::thread worker;
  struct Factor {
    int type = 0;
    std::vector<char> value;
  };
  std::map<int, Factor> factors;  // by number of the operation
  int next_op = 5;

  ~Comm() {
    if (socket >= 0) ::close(socket);
    ::close(wake);
  }
  std::atomic<bool> aborted{false};  // before `wake` is set; stays
  void abort() {
    aborted.store(true, std::memory_order_release);
    const uint64_t one = 1;
    (void)!::write(wake, &one, sizeof one);
  }

  void fail(int result, const std::string& sentence) {
    const std::lock_guard<std::mutex> lock(mutex);
    last_error = sentence;
    state.store(result, std::memory_order_release);
  }
};

std::atomic<int64_t> g_comms{0}, g_ops{0}, g_groups{0}, g_aborts{0};
std::atomic<bool> g_remote_errors{std::getenv("STANDIN_NCCL_REMOTE_ERRORS") != nullptr};
std::mutex g_mutex;  // guards g_alive
std::set<Comm*> g_alive;
standin::Faults g_faults{"STANDIN_NCCL_FAIL"};
thread_local int t_depth = 0;
thread_local int t_problem = kSuccess;
thread_local std::vector<Call> t_calls;

#define FAULT(name) \
  if (const int fault = g_faults.due(name); fault) return fault

bool alive(Comm* comm) {
  const std::lock_guard<std::mutex> lock(g_mutex);
  return g_alive.count(comm) > 0;
}

// Waits for an abort, as a kernel does whose peers never come.
void hang(Comm& comm) {
  pollfd watched{comm.wake, POLLIN, 0};
  while (!comm.aborted.load(std::memory_order_acquire)) (void)::poll(&watched, 1, -1);
}

// The hub's next answer. False when this communicator is of no use any more.
bool answer(Comm& comm, Header& header, std::vector<char>& data) {
  for (;;) {
    if (!standin::read_message(comm.socket, comm.wake, header, data)) return false;
    if (!header.failed) return true;
    if (header.lost && !g_remote_errors.load()) continue;
    comm.fail(header.lost ? kRemoteError : kInvalidUsage, std::string(data.begin(), data.end()));
    return false;
  }
}

void finish_task(Comm& comm) {
  const std::lock_guard<std::mutex> lock(comm.mutex);
  --comm.queued;
  comm.changed.notify_all();
}

// On the stream: all sends and receives of a group, or one collective.
void execute(Comm& comm, const std::vector<Call>& calls) {
  const int state = comm.state.load(std::memory_order_acquire);
  bool good = !comm.aborted.load() && (state == kSuccess || state == kInProgress);
  for (const Call& call : calls) {
    if (!good) break;
    Header header = call.header;
    const size_t element = standin::bytes_of(header.type);
    const bool gives =
        header.kind != standin::kReceive && (header.kind != standin::kBroadcast || header.root == comm.rank);
    header.bytes = gives ? header.count * element : 0;
    if (header.kind == standin::kReduceScatter) header.bytes *= static_cast<size_t>(comm.ranks);
    std::vector<char> data(static_cast<const char*>(call.input), static_cast<const char*>(call.input) + header.bytes);
    if (!call.factor.empty()) {
      standin::multiply(header.type, data.data(), call.factor.data(), header.bytes / element);
    }
    good = standin::write_message(comm.socket, comm.wake, header, data.data());
  }
  std::map<int, std::vector<const Call*>> receives;
  size_t answers = 0;
  for (const Call& call : calls) {
    if (call.header.kind == standin::kReceive) receives[call.header.rank].push_back(&call);
    answers += call.header.kind != standin::kSend;
  }
  for (size_t i = 0; good && i < answers; ++i) {
    Header header;
    std::vector<char> data;
    good = answer(comm, header, data);
    if (!good) break;
    const Call* call = &calls[0];
    if (header.kind == standin::kReceive) {
      call = receives[header.rank].front();
      receives[header.rank].erase(receives[header.rank].begin());
    }
    if (call->output && !data.empty()) std::memcpy(call->output, data.data(), data.size());
  }
  if (!good) hang(comm);
  finish_task(comm);
}

void queue(Comm& comm, std::vector<Call> calls) {
  void* stream = calls[0].stream;
  {
    const std::lock_guard<std::mutex> lock(comm.mutex);
    ++comm.queued;
  }
  auto* task = new std::function<void()>([&comm, calls = std::move(calls)] { execute(comm, calls); });
  const int result = cuLaunchHostFunc(
      stream,
      [](void* data) {
        const std::unique_ptr<std::function<void()>> run(static_cast<std::function<void()>*>(data));
        (*run)();
      },
      task);
  if (result == 0) return;
  delete task;
  finish_task(comm);
  comm.fail(kUnhandledCudaError, "cuLaunchHostFunc failed");
}

void launch(Comm& comm, const std::vector<Call>& calls) {
  std::vector<Call> exchanges;
  for (const Call& call : calls) {
    if (call.header.kind == standin::kSend || call.header.kind == standin::kReceive) {
      exchanges.push_back(call);
    } else {
      queue(comm, {call});
    }
  }
  if (!exchanges.empty()) queue(comm, std::move(exchanges));
}

// By itself or, where the host must not block, on a thread. Not after a failure.
int perform(Comm& comm, const std::function<void()>& work) {
  int expected = kSuccess;
  if (!comm.state.compare_exchange_strong(expected, kInProgress, std::memory_order_acq_rel)) return expected;
  const auto whole = [&comm, work] {
    work();
    int doing = kInProgress;
    comm.state.compare_exchange_strong(doing, kSuccess, std::memory_order_acq_rel);  // unless it failed
  };
  if (comm.blocking) {
    whole();
    return comm.state.load(std::memory_order_acquire);
  }
  if (comm.worker.joinable()) comm.worker.join();  // it has ended, or the communicator would not be ready
  comm.worker = std::thread(whole);
  return kInProgress;
}

void meet(Comm& comm) {
  comm.socket = standin::connect_to_hub(comm.hub);
  Header hello;
  hello.kind = standin::kHello;
  hello.rank = comm.rank;
  hello.ranks = comm.ranks;
  std::vector<char> data;
  if (comm.socket < 0 || !standin::write_message(comm.socket, comm.wake, hello, nullptr)) {
    return comm.fail(kRemoteError, "nobody listens under this unique id");
  }
  do {
    if (!standin::read_message(comm.socket, comm.wake, hello, data)) return hang(comm);
  } while (hello.failed);  // like the real one it waits for whoever is missing
}

int end_group() {
  std::vector<Call> calls;
  calls.swap(t_calls);
  const int problem = std::exchange(t_problem, kSuccess);
  FAULT("ncclGroupEnd");
  if (problem != kSuccess) return problem;
  int result = kSuccess;
  if (!calls.empty()) g_groups.fetch_add(1);
  std::map<Comm*, std::vector<Call>> by_comm;
  for (Call& call : calls) by_comm[call.comm].push_back(std::move(call));
  for (auto& [comm, own] : by_comm) {
    const int one = perform(*comm, [comm = comm, own = std::move(own)] { launch(*comm, own); });
    if (one != kSuccess) result = one;
  }
  return result;
}

int enqueue(const char* name, Call call, int op) {
  FAULT(name);
  Comm* comm = call.comm;
  const auto refuse = [&](int result, const std::string& why) {
    if (alive(comm)) {
      const std::lock_guard<std::mutex> lock(comm->mutex);
      comm->last_error = std::string(name) + ": " + why;
    }
    if (t_depth > 0) t_problem = result;
    return result;
  };
  if (!alive(comm)) return refuse(kInvalidArgument, "no such communicator");
  if (comm->state.load(std::memory_order_acquire) != kSuccess) {
    return refuse(kInvalidArgument, "the communicator is not ready");
  }
  Header& header = call.header;
  const size_t bytes = header.count * standin::bytes_of(header.type);
  if (bytes == 0 && header.count > 0) return refuse(kInvalidArgument, "unknown type");
  if (standin_cuda_device_of(call.stream) != comm->device) return refuse(kInvalidUsage, "a stream of another device");
  const auto factor = static_cast<size_t>(comm->ranks);
  const size_t in = header.kind == standin::kReduceScatter ? bytes * factor : bytes;
  const size_t out = header.kind == standin::kAllGather ? bytes * factor : bytes;
  const bool reads =
      header.kind != standin::kReceive && (header.kind != standin::kBroadcast || header.root == comm->rank);
  const bool writes = header.kind != standin::kSend && (header.kind != standin::kReduce || header.root == comm->rank);
  if (reads && in > 0 && !standin_cuda_holds(call.input, in, comm->device)) {
    return refuse(kInvalidArgument, "the input is no memory of the device");
  }
  if (writes && out > 0 && !standin_cuda_holds(call.output, out, comm->device)) {
    return refuse(kInvalidArgument, "the output is no memory of the device");
  }
  if (op > standin::kAverage) {
    const std::lock_guard<std::mutex> lock(comm->mutex);
    const auto found = comm->factors.find(op);
    if (found == comm->factors.end() || found->second.type != header.type) {
      return refuse(kInvalidArgument, "no such operation for this type");
    }
    call.factor = found->second.value;
    op = standin::kSum;
  }
  if (op == standin::kAverage && !standin::is_integer(header.type)) {  // NCCL multiplies first, too
    const float share = 1.0f / static_cast<float>(comm->ranks);
    const double exact = 1.0 / comm->ranks;
    call.factor.resize(standin::bytes_of(header.type));
    if (header.type == standin::kFloat64) {
      std::memcpy(call.factor.data(), &exact, sizeof exact);
    } else if (header.type == standin::kFloat32) {
      std::memcpy(call.factor.data(), &share, sizeof share);
    } else if (standin::bytes_of(header.type) == 1) {
      const uint8_t bits = standin::narrow8(header.type, share);
      std::memcpy(call.factor.data(), &bits, sizeof bits);
    } else {
      const uint16_t bits = standin::narrow(header.type, share);
      std::memcpy(call.factor.data(), &bits, sizeof bits);
    }
    op = standin::kSum;
  }
  header.op = op;
  t_calls.push_back(std::move(call));
  return t_depth > 0 ? kSuccess : end_group();
}

Call call_of(standin::Kind kind, const void* input, void* output, size_t count, int type, int root, Comm* comm,
             void* stream) {
  Call call;
  call.comm = comm;
  call.header.kind = kind;
  call.header.count = count;
  call.header.type = type;
  call.header.root = root;
  call.input = input;
  call.output = output;
  call.stream = stream;
  return call;
}

// Whether any communicator has work on the device.
bool device_busy(int device) {
  const std::lock_guard<std::mutex> lock(g_mutex);
  return std::any_of(g_alive.begin(), g_alive.end(), [device](Comm* comm) {
    if (comm->device != device) return false;
    const std::lock_guard<std::mutex> queue(comm->mutex);
    return comm->queued > 0;
  });
}

// NCCL gives memory of the device back then, for which the driver waits until nothing runs there.
void dispose(Comm* comm) {
  if (comm->worker.joinable()) comm->worker.join();
  while (device_busy(comm->device)) std::this_thread::sleep_for(std::chrono::microseconds(200));
  {
    const std::lock_guard<std::mutex> lock(g_mutex);
    g_alive.erase(comm);
  }
  g_ops.fetch_sub(static_cast<int64_t>(comm->factors.size()));
  g_comms.fetch_sub(1);
  delete comm;
}

}  // namespace

EXPORTED int ncclGetVersion(int* version) {
  const char* text = std::getenv("STANDIN_NCCL_VERSION");
  *version = text ? std::atoi(text) : 22703;
  return kSuccess;
}

EXPORTED const char* ncclGetErrorString(int result) {
  switch (result) {
    case kSuccess:
      return "no error";
    case kUnhandledCudaError:
      return "unhandled cuda error";
    case kInvalidArgument:
      return "invalid argument";
    case kInvalidUsage:
      return "invalid usage";
    case kRemoteError:
      return "remote process exited or there was a network error";
    case kInProgress:
      return "NCCL operation in progress";
    default:
      return "unknown result code";
  }
}

EXPORTED const char* ncclGetLastError(Comm* comm) {
  static thread_local std::string t_text;
  t_text.clear();
  if (comm && alive(comm)) {
    const std::lock_guard<std::mutex> lock(comm->mutex);
    t_text = comm->last_error;
  }
  return t_text.c_str();
}

EXPORTED int ncclGetUniqueId(UniqueId* id) {
  FAULT("ncclGetUniqueId");
  const std::string name = standin::start_hub();
  if (name.empty()) return kUnhandledCudaError;
  std::memset(id->bytes, 0, sizeof id->bytes);
  std::memcpy(id->bytes, name.data(), name.size());
  return kSuccess;
}

EXPORTED int ncclCommInitRankConfig(Comm** comm, int ranks, UniqueId id, int rank, const Config* config) {
  FAULT("ncclCommInitRankConfig");
  if (!config || config->size < sizeof(Config) || config->magic != 0xcafebeef) return kInvalidArgument;
  if (rank < 0 || rank >= ranks) return kInvalidArgument;
  auto made = std::make_unique<Comm>();
  if (cuCtxGetDevice(&made->device) != 0) return kUnhandledCudaError;
  made->rank = rank;
  made->ranks = ranks;
  made->blocking = config->blocking != 0;
  made->hub = id.bytes;
  g_comms.fetch_add(1);
  *comm = made.release();
  {
    const std::lock_guard<std::mutex> lock(g_mutex);
    g_alive.insert(*comm);
  }
  return perform(**comm, [comm = *comm] { meet(*comm); });
}

EXPORTED int ncclCommGetAsyncError(Comm* comm, int* result) {
  FAULT("ncclCommGetAsyncError");
  if (!alive(comm)) return kInvalidArgument;
  FAULT(("ncclCommGetAsyncError@" + std::to_string(comm->rank)).c_str());  // of one rank only
  *result = comm->state.load(std::memory_order_acquire);
  return kSuccess;
}

EXPORTED int ncclCommFinalize(Comm* comm) {
  FAULT("ncclCommFinalize");
  if (!alive(comm) || comm->state.load() != kSuccess || comm->finalized) return kInvalidArgument;
  comm->finalized = true;
  return perform(*comm, [comm] {
    std::unique_lock<std::mutex> lock(comm->mutex);
    comm->changed.wait(lock, [&] { return comm->queued == 0; });
  });
}

EXPORTED int ncclCommDestroy(Comm* comm) {
  FAULT("ncclCommDestroy");
  if (!alive(comm)) return kInvalidArgument;
  dispose(comm);
  return kSuccess;
}

EXPORTED int ncclCommAbort(Comm* comm) {
  FAULT("ncclCommAbort");
  if (!alive(comm)) return kInvalidArgument;
  g_aborts.fetch_add(1);
  comm->abort();
  dispose(comm);
  return kSuccess;
}

EXPORTED int ncclGroupStart() {
  FAULT("ncclGroupStart");
  ++t_depth;
  return kSuccess;
}

EXPORTED int ncclGroupEnd() {
  if (t_depth == 0) return kInvalidUsage;
  return --t_depth > 0 ? kSuccess : end_group();
}

EXPORTED int ncclRedOpCreatePreMulSum(int* op, const void* scalar, int type, int residence, Comm* comm) {
  FAULT("ncclRedOpCreatePreMulSum");
  if (!alive(comm) || comm->state.load() != kSuccess || residence != 1) return kInvalidArgument;
  const std::lock_guard<std::mutex> lock(comm->mutex);
  Comm::Factor& factor = comm->factors[*op = comm->next_op++];
  factor.type = type;
  const auto* bytes = static_cast<const char*>(scalar);
  factor.value.assign(bytes, bytes + standin::bytes_of(type));
  g_ops.fetch_add(1);
  return kSuccess;
}

EXPORTED int ncclRedOpDestroy(int op, Comm* comm) {
  FAULT("ncclRedOpDestroy");
  if (!alive(comm)) return kInvalidArgument;
  const std::lock_guard<std::mutex> lock(comm->mutex);
  if (comm->factors.erase(op) == 0) return kInvalidArgument;
  g_ops.fetch_sub(1);
  return kSuccess;
}

EXPORTED int ncclAllReduce(const void* in, void* out, size_t count, int type, int op, Comm* comm, void* stream) {
  return enqueue("ncclAllReduce", call_of(standin::kAllReduce, in, out, count, type, 0, comm, stream), op);
}
EXPORTED int ncclBroadcast(const void* in, void* out, size_t count, int type, int root, Comm* comm, void* stream) {
  return enqueue("ncclBroadcast", call_of(standin::kBroadcast, in, out, count, type, root, comm, stream), 0);
}
EXPORTED int ncclReduce(const void* in, void* out, size_t count, int type, int op, int root, Comm* comm, void* stream) {
  return enqueue("ncclReduce", call_of(standin::kReduce, in, out, count, type, root, comm, stream), op);
}
EXPORTED int ncclReduceScatter(const void* in, void* out, size_t count, int type, int op, Comm* comm, void* stream) {
  return enqueue("ncclReduceScatter", call_of(standin::kReduceScatter, in, out, count, type, 0, comm, stream), op);
}
EXPORTED int ncclAllGather(const void* in, void* out, size_t count, int type, Comm* comm, void* stream) {
  return enqueue("ncclAllGather", call_of(standin::kAllGather, in, out, count, type, 0, comm, stream), 0);
}
EXPORTED int ncclSend(const void* in, size_t count, int type, int peer, Comm* comm, void* stream) {
  Call call = call_of(standin::kSend, in, nullptr, count, type, 0, comm, stream);
  call.header.rank = peer;
  return enqueue("ncclSend", std::move(call), 0);
}
EXPORTED int ncclRecv(void* out, size_t count, int type, int peer, Comm* comm, void* stream) {
  Call call = call_of(standin::kReceive, nullptr, out, count, type, 0, comm, stream);
  call.header.rank = peer;
  return enqueue("ncclRecv", std::move(call), 0);
}

// -- for tests --------------------------------------------------------------------------------------------------------

EXPORTED void standin_nccl_fail(const char* function, int code, int skip) { g_faults.plan(function, code, skip); }
EXPORTED void standin_nccl_remote_errors(int on) { g_remote_errors.store(on != 0); }
EXPORTED int64_t standin_nccl_count(const char* what) {
  const std::string name = what;
  return name == "communicators" ? g_comms.load()
         : name == "operations"  ? g_ops.load()
         : name == "groups"      ? g_groups.load()
         : name == "aborts"      ? g_aborts.load()
                                 : -1;
}
