// A stand-in for the part of NCCL that the engine calls: real ranks (processes or threads) that meet over Unix sockets,
// calls that run in stream order, communicators that never block the host where they are asked not to.
//
// Where ranks call different things the real one hangs; this one says so as an asynchronous error, and hangs as well
// until the communicator is aborted. A rank that is gone is waited for like the real one does within a host, or told as
// ncclRemoteError after standin_nccl_remote_errors(1), or where STANDIN_NCCL_REMOTE_ERRORS is set. Pointers must be
// memory of the communicator's device.
//
// This file has the calls; communicators are in standin_nccl_comms.cc, the network between them in hub.cc.
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "arithmetic.h"
#include "nccl_comm.h"

using namespace standin::nccl;
using standin::Header;

namespace {

thread_local int t_depth = 0;
thread_local int t_problem = kSuccess;
thread_local std::vector<Call> t_calls;

int end_group() {
  std::vector<Call> calls;
  calls.swap(t_calls);
  const int problem = std::exchange(t_problem, kSuccess);
  FAULT("ncclGroupEnd");
  if (problem != kSuccess) return problem;
  int result = kSuccess;
  if (!calls.empty()) g_counts.groups.fetch_add(1);
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
  if (comm->ranks == 1 && !call.factor.empty() && standin::bytes_of(header.type) == 1 &&
      !standin::is_integer(header.type)) {
    return refuse(kInvalidArgument, "one rank does not multiply float8");  // as that of PyTorch 2.11
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

EXPORTED int ncclGroupStart() {
  FAULT("ncclGroupStart");
  ++t_depth;
  return kSuccess;
}

EXPORTED int ncclGroupEnd() {
  if (t_depth == 0) return kInvalidUsage;
  return --t_depth > 0 ? kSuccess : end_group();
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
  return name == "communicators" ? g_counts.comms.load()
         : name == "operations"  ? g_counts.ops.load()
         : name == "groups"      ? g_counts.groups.load()
         : name == "aborts"      ? g_counts.aborts.load()
                                 : -1;
}
