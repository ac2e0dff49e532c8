// The two libraries that GPU tensors need, as the engine finds and calls them; and that their stand-ins keep the order
// that the real ones promise, so that the tests which are built on them mean something.
#include <cstring>
#include <thread>
#include <utility>

#include "gpu_world.h"
#include "named_tests.h"

using namespace horovod;
using namespace horovod::testing;

namespace {

void a_library_that_is_not_there_is_named() {
  Status status;
  CHECK(!cuda::driver("/nowhere/libcuda.so.1", status));
  CHECK(ends_with(status, error_code::no_gpu, "/nowhere/libcuda.so.1", "HOROVOD_CUDA_LIBRARY"));
  CHECK(!nccl::library("/nowhere/libnccl.so.2", status));
  CHECK(ends_with(status, error_code::no_nccl, "/nowhere/libnccl.so.2", "HOROVOD_NCCL_LIBRARY"));
}

void a_library_without_the_functions_is_refused_by_their_names() {
  Status status;
  CHECK(!cuda::driver("libm.so.6", status));
  CHECK(ends_with(status, error_code::no_gpu, "cuMemAllocFromPoolAsync"));
  CHECK(!nccl::library("libm.so.6", status));
  CHECK(ends_with(status, error_code::no_nccl, "libm.so.6", "HOROVOD_NCCL_LIBRARY"));
}

void versions_are_those_of_the_files() {
  CHECK(the_library().version_code == 22703);
  int version = 0;
  CHECK_OK(the_driver().call(the_driver().version, &version));
  CHECK(version == 12040);
}

void an_error_says_what_was_called_and_what_cuda_calls_it() {
  Gpu gpu(0);
  plan_fault("cuda", "cuEventRecord", 719);
  std::shared_ptr<DeviceEvent> event;
  const Status status = gpu.device->record(gpu.stream->handle(), event);
  CHECK(status.code() == Code::internal && !event);
  CHECK(ends_with(status, error_code::gpu_failed, "cuEventRecord", "CUDA_ERROR_LAUNCH_FAILED (719"));
}

void a_gpu_that_is_not_there_is_told() {
  Status status;
  plan_fault("cuda", "cuInit", 100);
  CHECK(!cuda::Device::open(the_driver(), 0, status));
  CHECK(ends_with(status, error_code::no_gpu, "cuInit", "CUDA_ERROR_NO_DEVICE (100"));
  CHECK(!cuda::Device::open(the_driver(), 99, status));
  CHECK(ends_with(status, error_code::no_gpu, "GPU 99", " 8."));
}

void memory_that_is_not_there_is_told() {
  Gpu gpu(0);
  OutputBuffer buffer;
  const Status status = gpu.device->allocate(size_t{1} << 50, gpu.stream, buffer);
  CHECK(ends_with(status, error_code::out_of_memory, "GPU 0", "1125899906842624 bytes"));
  CHECK(!buffer.data && !buffer.on_device);
}

void streams_wait_for_moments_of_others_and_for_nothing_else() {
  Gpu one(0), other(0);
  void* held = one.hold();
  const std::shared_ptr<DeviceEvent> first = one.now();
  const std::shared_ptr<DeviceEvent> unordered = other.now();
  CHECK(eventually([&] { return passed(*unordered); }));
  CHECK_OK(first->precede(reinterpret_cast<uintptr_t>(other.stream->handle())));
  const std::shared_ptr<DeviceEvent> second = other.now();
  CHECK(!passed(*first) && !passed(*second));
  Gpu::release(held);
  CHECK(eventually([&] { return passed(*second); }));
  CHECK(passed(*first));
}

void events_are_used_again_and_a_wait_keeps_to_what_it_was_for() {
  Gpu one(0), other(one.device);
  void* held = one.hold();
  CHECK_OK(one.now()->precede(reinterpret_cast<uintptr_t>(other.stream->handle())));  // its event is free again
  const std::shared_ptr<DeviceEvent> behind = other.now();
  CHECK(other.now() != nullptr);
  const int64_t events = count("cuda", "events");
  for (int i = 0; i < 100; ++i) CHECK(other.now() != nullptr);  // all on that event
  CHECK(count("cuda", "events") == events);
  CHECK(!passed(*behind));
  Gpu::release(held);
  CHECK(eventually([&] { return passed(*behind); }));
}

void memory_is_given_back_in_the_order_of_the_stream_that_uses_it() {
  Gpu engine(0), framework(0);
  const int64_t blocks = count("cuda", "blocks");
  OutputBuffer buffer = engine.make<int32_t>({1, 2, 3});
  buffer.on_device->hand_over(reinterpret_cast<uintptr_t>(framework.stream->handle()));
  void* held = framework.hold();  // the framework still reads it
  buffer = {};
  engine.synchronize();
  CHECK(count("cuda", "blocks") == blocks + 1);
  Gpu::release(held);
  CHECK(eventually([&] { return count("cuda", "blocks") == blocks; }));
}

void memory_that_is_not_in_use_stays_with_the_pool() {
  Gpu gpu(0);
  const int64_t before = count("cuda", "reserved");
  const auto use = [&](size_t bytes) {
    OutputBuffer buffer;
    CHECK_OK(gpu.device->allocate(bytes, gpu.stream, buffer));
    buffer = {};
    gpu.synchronize();  // it has been given back
    gpu.synchronize();  // and what is too much, to the system
    return count("cuda", "reserved") - before;
  };
  CHECK(use(1u << 20) == 1u << 20);
  CHECK(use(100u << 20) == static_cast<int64_t>(cuda::Device::kIdleBytes));
}

void memory_is_not_given_back_to_a_graph() {
  Gpu engine(0), framework(0);
  const int64_t blocks = count("cuda", "blocks");
  OutputBuffer buffer = engine.make<int32_t>({1, 2, 3});
  const cuda::StreamHandle stream = framework.stream->handle();
  buffer.on_device->hand_over(reinterpret_cast<uintptr_t>(stream));
  CHECK(standin<int(cuda::StreamHandle, int)>("cuStreamBeginCapture_v2")(stream, 0) == 0);
  buffer = {};
  CHECK(engine.make<int32_t>({4}).bytes == 4);
  CHECK(count("cuda", "blocks") >= blocks + 1);
  void* graph = nullptr;
  CHECK(standin<int(cuda::StreamHandle, void**)>("cuStreamEndCapture")(stream, &graph) == 0);
  CHECK(engine.make<int32_t>({4}).bytes == 4);  // the next one sees to it
  CHECK(eventually([&] { return count("cuda", "blocks") == blocks; }));
}

void everything_goes_with_its_last_user() {
  const int64_t pools = count("cuda", "pools");
  const int64_t contexts = count("cuda", "contexts"), streams = count("cuda", "streams"),
                events = count("cuda", "events");
  {
    auto gpu = std::make_unique<Gpu>(3);
    const std::shared_ptr<DeviceEvent> event = gpu->now();
    OutputBuffer buffer = gpu->make<float>({1});
    gpu.reset();
    CHECK(count("cuda", "contexts") == contexts + 1);  // the event and the memory still need it
    CHECK(passed(*event));
    CHECK(count("cuda", "pools") == pools + 1);
  }
  CHECK(eventually([&] { return count("cuda", "pools") == pools; }));
  CHECK(count("cuda", "contexts") == contexts && count("cuda", "streams") == streams);
  CHECK(count("cuda", "events") == events);
}

// -- NCCL's stand-in --------------------------------------------------------------------------------------------------

int settled(nccl::CommHandle comm) {
  int state = nccl::kInProgress;
  CHECK(eventually([&] {
    CHECK(the_library().async_error(comm, &state) == 0);
    return state != nccl::kInProgress;
  }));
  return state;
}

// Ranks of one communicator, one for each GPU, all driven by this thread: nothing of it may block.
struct Ranks {
  explicit Ranks(int n) {
    nccl::UniqueId id;
    for (int rank = 0; rank < n; ++rank) {
      gpus.push_back(std::make_unique<Gpu>(rank));
      comms.push_back(nullptr);
      const cuda::Device::Current current(*gpus[rank]->device);
      if (rank == 0) CHECK(the_library().unique_id(&id) == 0);
      nccl::Config config;
      CHECK(the_library().init_rank(&comms[rank], n, id, rank, &config) == nccl::kInProgress);
    }
    for (nccl::CommHandle comm : comms) CHECK(settled(comm) == 0);
  }
  ~Ranks() {
    for (nccl::CommHandle comm : comms) CHECK(!comm || the_library().abort(comm) == 0);
  }
  int all_reduce(int rank, OutputBuffer& data, size_t elements, int op = nccl::kSum) {
    return the_library().all_reduce(data.data.get(), data.data.get(), elements, nccl::kInt32, op, comms[rank],
                                    gpus[rank]->stream->handle());
  }

  std::vector<std::unique_ptr<Gpu>> gpus;
  std::vector<nccl::CommHandle> comms;
};

void an_operation_runs_when_all_ranks_and_their_streams_have_come() {
  Ranks ranks(2);
  OutputBuffer data[] = {ranks.gpus[0]->make<int32_t>({1, 2}), ranks.gpus[1]->make<int32_t>({10, 20})};
  void* held = ranks.gpus[1]->hold();
  for (int rank : {0, 1}) CHECK(ranks.all_reduce(rank, data[rank], 2) == nccl::kInProgress);
  for (nccl::CommHandle comm : ranks.comms) CHECK(settled(comm) == 0);  // queued, not done
  const std::shared_ptr<DeviceEvent> done = ranks.gpus[0]->now();
  CHECK(!passed(*done) && values_of<int32_t>(data[0])[0] == 1);
  Gpu::release(held);
  CHECK(eventually([&] { return passed(*done); }));
  CHECK((values_of<int32_t>(data[0]) == std::vector<int32_t>{11, 22}));
}

void a_group_is_one_launch() {
  Ranks ranks(2);
  const int64_t groups = count("nccl", "groups");
  std::vector<OutputBuffer> data[2];
  for (int rank : {0, 1}) {
    for (int32_t i = 0; i < 3; ++i) data[rank].push_back(ranks.gpus[rank]->make<int32_t>({i + rank}));
    CHECK(the_library().group_start() == 0);
    for (OutputBuffer& one : data[rank]) CHECK(ranks.all_reduce(rank, one, 1) == 0);
    CHECK(the_library().group_end() == nccl::kInProgress);
  }
  for (int rank : {0, 1}) CHECK(settled(ranks.comms[rank]) == 0);
  ranks.gpus[0]->synchronize();
  for (int32_t i = 0; i < 3; ++i) CHECK(values_of<int32_t>(data[0][i])[0] == 2 * i + 1);
  CHECK(count("nccl", "groups") == groups + 2);
}

void communicators_don_t_meet() {
  Ranks others(3), ranks(2);  // `ranks`, of which one never comes, end first: the end of others waits for all of a GPU
  OutputBuffer mine = ranks.gpus[0]->make<int32_t>({1}), theirs = others.gpus[0]->make<int32_t>({1});
  CHECK(ranks.all_reduce(0, mine, 1) == nccl::kInProgress);
  std::vector<OutputBuffer> rest;
  for (int rank : {1, 2}) rest.push_back(others.gpus[rank]->make<int32_t>({1}));
  CHECK(others.all_reduce(0, theirs, 1) == nccl::kInProgress);
  for (int rank : {1, 2}) CHECK(others.all_reduce(rank, rest[rank - 1], 1) == nccl::kInProgress);
  CHECK(settled(others.comms[0]) == 0);
  others.gpus[0]->synchronize();
  CHECK(values_of<int32_t>(theirs)[0] == 3 && values_of<int32_t>(mine)[0] == 1);
}

void a_peer_that_never_comes_is_waited_for_until_the_abort() {
  auto ranks = std::make_unique<Ranks>(2);
  OutputBuffer data = ranks->gpus[0]->make<int32_t>({1});
  CHECK(ranks->all_reduce(0, data, 1) == nccl::kInProgress);
  CHECK(settled(ranks->comms[0]) == 0);
  const std::shared_ptr<DeviceEvent> done = ranks->gpus[0]->now();
  CHECK(!passed(*done));
  ranks.reset();
  CHECK(eventually([&] { return passed(*done); }));
}

void a_peer_that_is_gone_is_told_where_that_is_wanted() {
  Ranks ranks(2);
  standin<void(int)>("standin_nccl_remote_errors")(1);
  OutputBuffer data = ranks.gpus[0]->make<int32_t>({1});
  CHECK(ranks.all_reduce(0, data, 1) == nccl::kInProgress);
  CHECK(the_library().abort(std::exchange(ranks.comms[1], nullptr)) == 0);
  CHECK(eventually([&] { return settled(ranks.comms[0]) == nccl::kRemoteError; }));
  standin<void(int)>("standin_nccl_remote_errors")(0);
}

void ranks_that_differ_are_told() {
  Ranks ranks(2);
  OutputBuffer data[] = {ranks.gpus[0]->make<int32_t>({1, 2}), ranks.gpus[1]->make<int32_t>({1, 2})};
  CHECK(ranks.all_reduce(0, data[0], 2) == nccl::kInProgress);
  CHECK(ranks.all_reduce(1, data[1], 1) == nccl::kInProgress);
  for (nccl::CommHandle comm : ranks.comms) {
    CHECK(eventually([&] { return settled(comm) == nccl::kInvalidUsage; }));
    const Status status = the_library().failure("ncclAllReduce", nccl::kInvalidUsage, comm);
    CHECK(ends_with(status, error_code::nccl_failed, "ncclAllReduce", "invalid usage (5)", "\"rank 0 calls"));
  }
}

void memory_of_the_host_is_refused() {
  Ranks ranks(1);
  int32_t mine = 1;
  CHECK(the_library().all_reduce(&mine, &mine, 1, nccl::kInt32, nccl::kSum, ranks.comms[0],
                                 ranks.gpus[0]->stream->handle()) == nccl::kInvalidArgument);
}

void communicators_go() {
  const int64_t before = count("nccl", "communicators");
  {
    Ranks ranks(3);
  }
  CHECK(count("nccl", "communicators") == before);
}

constexpr NamedTest kTests[] = {
    {"a library that is not there is named", a_library_that_is_not_there_is_named},
    {"a library without the functions is refused by their names",
     a_library_without_the_functions_is_refused_by_their_names},
    {"versions are those of the files", versions_are_those_of_the_files},
    {"an error says what was called and what CUDA calls it", an_error_says_what_was_called_and_what_cuda_calls_it},
    {"a GPU that is not there is told", a_gpu_that_is_not_there_is_told},
    {"memory that is not there is told", memory_that_is_not_there_is_told},
    {"streams wait for events of others and for nothing else", streams_wait_for_moments_of_others_and_for_nothing_else},
    {"events are used again and a wait keeps to what it was for",
     events_are_used_again_and_a_wait_keeps_to_what_it_was_for},
    {"memory is given back in the order of the stream that uses it",
     memory_is_given_back_in_the_order_of_the_stream_that_uses_it},
    {"memory that is not in use stays with the pool", memory_that_is_not_in_use_stays_with_the_pool},
    {"memory is not given back to a graph", memory_is_not_given_back_to_a_graph},
    {"everything goes with its last user", everything_goes_with_its_last_user},
    {"an operation runs when all ranks and their streams have come",
     an_operation_runs_when_all_ranks_and_their_streams_have_come},
    {"a group is one launch", a_group_is_one_launch},
    {"communicators don't meet", communicators_don_t_meet},
    {"a peer that never comes is waited for until the abort", a_peer_that_never_comes_is_waited_for_until_the_abort},
    {"a peer that is gone is told where that is wanted", a_peer_that_is_gone_is_told_where_that_is_wanted},
    {"ranks that differ are told", ranks_that_differ_are_told},
    {"memory of the host is refused", memory_of_the_host_is_refused},
    {"communicators go", communicators_go},
};

}  // namespace

int main(int argc, char** argv) { return run_named(argc, argv, kTests); }
