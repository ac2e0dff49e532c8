// The part of NCCL's stand-in with communicators: how they begin, run what is queued, and end.
#include "nccl_comm.h"

#include <poll.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>

#include "arithmetic.h"

using namespace standin::nccl;
using standin::Header;

namespace standin::nccl {

Counts g_counts;
std::atomic<bool> g_remote_errors{std::getenv("STANDIN_NCCL_REMOTE_ERRORS") != nullptr};
standin::Faults g_faults{"STANDIN_NCCL_FAIL"};

}  // namespace standin::nccl

namespace {

std::mutex g_mutex;  // guards g_alive
std::set<Comm*> g_alive;

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
  g_counts.ops.fetch_sub(static_cast<int64_t>(comm->factors.size()));
  g_counts.comms.fetch_sub(1);
  delete comm;
}

}  // namespace

bool standin::nccl::alive(Comm* comm) {
  const std::lock_guard<std::mutex> lock(g_mutex);
  return g_alive.count(comm) > 0;
}

void standin::nccl::launch(Comm& comm, const std::vector<Call>& calls) {
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

int standin::nccl::perform(Comm& comm, const std::function<void()>& work) {
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

EXPORTED int ncclGetUniqueId(UniqueId* id) {
  FAULT("ncclGetUniqueId");
  // The real one may initialize CUDA's runtime here, which takes the first device for a thread that has none.
  if (int device = -1; cuCtxGetDevice(&device) != 0) return kUnhandledCudaError;
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
  g_counts.comms.fetch_add(1);
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
  g_counts.aborts.fetch_add(1);
  comm->abort();
  dispose(comm);
  return kSuccess;
}

EXPORTED int ncclRedOpCreatePreMulSum(int* op, const void* scalar, int type, int residence, Comm* comm) {
  FAULT("ncclRedOpCreatePreMulSum");
  if (!alive(comm) || comm->state.load() != kSuccess || residence != 1) return kInvalidArgument;
  const std::lock_guard<std::mutex> lock(comm->mutex);
  Comm::Factor& factor = comm->factors[*op = comm->next_op++];
  factor.type = type;
  const auto* bytes = static_cast<const char*>(scalar);
  factor.value.assign(bytes, bytes + standin::bytes_of(type));
  g_counts.ops.fetch_add(1);
  return kSuccess;
}

EXPORTED int ncclRedOpDestroy(int op, Comm* comm) {
  FAULT("ncclRedOpDestroy");
  if (!alive(comm)) return kInvalidArgument;
  const std::lock_guard<std::mutex> lock(comm->mutex);
  if (comm->factors.erase(op) == 0) return kInvalidArgument;
  g_counts.ops.fetch_sub(1);
  return kSuccess;
}
