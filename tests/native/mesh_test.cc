// The TCP data plane without Python: ranks are threads, connected by socket pairs or loopback TCP. Collectives are
// compared with a scalar oracle, the order log is driven in random order, and misbehaving peers are played by hand.
//
//   mesh_test            all tests
//   mesh_test NAME       those whose name contains NAME
//   mesh_test --bench [LEAST [MOST]]   latency and bandwidth over loopback TCP, for sizes in that range
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <string>
#include <thread>

#include "collectives/mesh/collectives.h"
#include "collectives/mesh/eager_store.h"
#include "engine/mesh_order_log.h"
#include "transport/mesh.h"
#include "transport/mesh_frame.h"

using namespace horovod;

namespace {

#define CHECK(condition)                                                          \
  do {                                                                            \
    if (!(condition)) {                                                           \
      std::fprintf(stderr, "%s:%d: CHECK(%s)\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                               \
    }                                                                             \
  } while (0)
#define CHECK_OK(expression)                                                                                    \
  do {                                                                                                          \
    const Status check_status = (expression);                                                                   \
    if (!check_status.ok()) {                                                                                   \
      std::fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #expression, check_status.message().c_str()); \
      std::abort();                                                                                             \
    }                                                                                                           \
  } while (0)

bool contains(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return true;
  std::fprintf(stderr, "\"%s\" lacks \"%s\"\n", text.c_str(), part.c_str());
  return false;
}

// -- worlds -----------------------------------------------------------------------------------------------------------

enum class Wire { pair, tcp };

void connect_pair(Wire wire, int fds[2]) {
  if (wire == Wire::pair) {
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, fds) == 0);
    return;
  }
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  CHECK(bind(listener, reinterpret_cast<sockaddr*>(&address), length) == 0);
  CHECK(listen(listener, 1) == 0);
  CHECK(getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length) == 0);
  fds[0] = socket(AF_INET, SOCK_STREAM, 0);
  CHECK(connect(fds[0], reinterpret_cast<sockaddr*>(&address), length) == 0);
  fds[1] = accept(listener, nullptr, nullptr);
  CHECK(fds[1] >= 0);
  close(listener);
}

std::string label_of(int rank) {
  return "rank " + std::to_string(rank) + " (pid 4242) on host node-" + std::to_string(rank);
}

// What each rank needs to make its mesh.
std::vector<std::vector<MeshPeer>> connect_all(int n, Wire wire, int connections) {
  std::vector<std::vector<MeshPeer>> peers(n);
  for (int r = 0; r < n; ++r) {
    peers[r].resize(n);
    for (int p = 0; p < n; ++p) peers[r][p].label = label_of(p);
  }
  for (int a = 0; a < n; ++a) {
    for (int b = a + 1; b < n; ++b) {
      for (int c = 0; c < connections; ++c) {
        int fds[2];
        connect_pair(wire, fds);
        peers[a][b].fds.push_back(fds[0]);
        peers[b][a].fds.push_back(fds[1]);
      }
    }
  }
  return peers;
}

struct World {
  World(int n, Wire wire = Wire::pair, int connections = 1, Config config = {})
      : aborts(n), peers(connect_all(n, wire, connections)) {
    for (int r = 0; r < n; ++r) {
      Status status;
      meshes.push_back(Mesh::create(r, 7, peers[r], config, aborts[r], status));
      CHECK_OK(status);
    }
  }
  int size() const { return static_cast<int>(meshes.size()); }
  Mesh& operator[](int rank) { return *meshes[rank]; }

  std::vector<AbortSignal> aborts;
  std::vector<std::vector<MeshPeer>> peers;
  std::vector<std::unique_ptr<Mesh>> meshes;
};

void in_ranks(int n, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int r = 0; r < n; ++r) threads.emplace_back(body, r);
  for (std::thread& thread : threads) thread.join();
}

// -- values -----------------------------------------------------------------------------------------------------------

// Small integers are exact in every dtype, so that the oracle may compute in double.
uint16_t half_of(double value, DType dtype) {
  const auto single = static_cast<float>(value);
  uint32_t bits;
  std::memcpy(&bits, &single, 4);
  if (dtype == DType::bfloat16) return static_cast<uint16_t>(bits >> 16);
  if (value == 0) return 0;
  return static_cast<uint16_t>((bits >> 16 & 0x8000) | (((bits >> 23 & 0xff) - 112) << 10) | (bits >> 13 & 0x3ff));
}
double from_half(uint16_t half, DType dtype) {
  uint32_t bits = static_cast<uint32_t>(half) << 16;
  if (dtype == DType::float16) {
    bits = (half & 0x7fff) == 0 ? 0
                                : (static_cast<uint32_t>(half & 0x8000) << 16) | (((half >> 10 & 0x1f) + 112u) << 23) |
                                      (half & 0x3ffu) << 13;
  }
  float single;
  std::memcpy(&single, &bits, 4);
  return single;
}
template <typename T>
void put_as(std::byte* at, double value) {
  const T typed = static_cast<T>(value);
  std::memcpy(at, &typed, sizeof(T));
}
template <typename T>
double get_as(const std::byte* at) {
  T typed;
  std::memcpy(&typed, at, sizeof(T));
  return static_cast<double>(typed);
}
void put(DType dtype, std::byte* at, double value) {
  switch (dtype) {
    case DType::uint8:
      return put_as<uint8_t>(at, value);
    case DType::int8:
      return put_as<int8_t>(at, value);
    case DType::int16:
      return put_as<int16_t>(at, value);
    case DType::uint16:
      return put_as<uint16_t>(at, value);
    case DType::int32:
      return put_as<int32_t>(at, value);
    case DType::int64:
      return put_as<int64_t>(at, value);
    case DType::float32:
      return put_as<float>(at, value);
    case DType::float64:
      return put_as<double>(at, value);
    case DType::boolean:
      return put_as<uint8_t>(at, value != 0);
    default:
      return put_as<uint16_t>(at, half_of(value, dtype));
  }
}
double get(DType dtype, const std::byte* at) {
  switch (dtype) {
    case DType::uint8:
      return get_as<uint8_t>(at);
    case DType::int8:
      return get_as<int8_t>(at);
    case DType::int16:
      return get_as<int16_t>(at);
    case DType::uint16:
      return get_as<uint16_t>(at);
    case DType::int32:
      return get_as<int32_t>(at);
    case DType::int64:
      return get_as<int64_t>(at);
    case DType::float32:
      return get_as<float>(at);
    case DType::float64:
      return get_as<double>(at);
    case DType::boolean:
      return get_as<uint8_t>(at);
    default:
      return from_half(static_cast<uint16_t>(get_as<uint16_t>(at)), dtype);
  }
}

// Input element i of tensor t on a rank: 0 to 4, so that sums of five ranks stay small.
double value_of(int rank, size_t tensor, int64_t i) {
  return static_cast<double>((static_cast<uint64_t>(i) * 7 + tensor * 3 + static_cast<uint64_t>(rank) * 5 + 1) % 5);
}

// One tensor of an operation, with its memory.
struct Tensor {
  DType dtype;
  std::vector<int64_t> shape;
  std::vector<std::byte> input, output;

  Tensor(DType dtype, std::vector<int64_t> shape, int rank, size_t index) : dtype(dtype), shape(std::move(shape)) {
    const int64_t count = elements();
    input.resize(static_cast<size_t>(count) * size_of(dtype));
    output.resize(input.size(), std::byte{0xee});
    for (int64_t i = 0; i < count; ++i) put(dtype, input.data() + i * size_of(dtype), value_of(rank, index, i));
  }
  int64_t elements() const {
    int64_t product = 1;
    for (int64_t d : shape) product *= d;
    return product;
  }
};

struct Job {  // a batch on one rank
  std::deque<Tensor> tensors;
  std::deque<Operation> operations;
  std::vector<Operation*> batch;

  // Each inner list is one operation of several tensors.
  Job(int rank, OpType type, DType dtype, const std::vector<std::vector<std::vector<int64_t>>>& shapes, bool in_place,
      bool has_output) {
    size_t index = 0;
    for (const auto& group : shapes) {
      Operation& operation = operations.emplace_back();
      operation.spec.type = type;
      operation.spec.name = "test";
      operation.spec.reduce_op = ReduceOp::sum;
      for (const auto& shape : group) {
        Tensor& tensor = tensors.emplace_back(dtype, shape, rank, index++);
        operation.spec.tensors.push_back({dtype, shape});
        std::byte* output = !has_output ? nullptr : in_place ? tensor.input.data() : tensor.output.data();
        operation.spans.push_back({tensor.input.data(), output, tensor.elements()});
      }
      batch.push_back(&operation);
    }
  }
};

double reduced(ReduceOp op, int n, size_t tensor, int64_t i, double prescale) {
  double result = 0;
  for (int r = 0; r < n; ++r) {
    const double x = prescale * value_of(r, tensor, i);
    if (r == 0) {
      result = x;
    } else if (op == ReduceOp::min) {
      result = std::min(result, x);
    } else if (op == ReduceOp::max) {
      result = std::max(result, x);
    } else if (op == ReduceOp::product) {
      result *= x;
    } else {
      result += x;
    }
  }
  return result;
}

const std::vector<DType> kDTypes = {DType::float32, DType::int64,   DType::float16, DType::bfloat16,
                                    DType::uint8,   DType::boolean, DType::float64, DType::int32};

using Shapes = std::vector<std::vector<std::vector<int64_t>>>;
const std::vector<Shapes> kShapes = {
    {{{}}},                                         // a scalar
    {{{0}}},                                        // nothing
    {{{1}}},                                        //
    {{{7}}, {{0, 3}}, {{2, 5}}},                    // fused, one of them empty
    {{{13}, {4, 3}}, {{1001}}},                     // a group, fused with another
    {{{70'001}}},                                   // several chunks or not, depending on the dtype
    {{{300'007}}, {{5}}, {{99'991, 3}}, {{1, 1}}},  // large and odd
};

void each_world(const std::function<void(World&)>& body) {
  for (int n = 1; n <= 5; ++n) {
    for (const int connections : {1, 3}) {
      World world(n, connections == 1 ? Wire::pair : Wire::tcp, connections);
      body(world);
    }
  }
}

// -- collectives
// --------------------------------------------------------------------------------------------------------

void test_allreduce() {
  each_world([](World& world) {
    for (const Shapes& shapes : kShapes) {
      for (const DType dtype : kDTypes) {
        const bool large = shapes[0][0] == std::vector<int64_t>{300'007};
        const bool medium = shapes[0][0] == std::vector<int64_t>{70'001};
        if (large && dtype != DType::float32) continue;
        if (medium && dtype != DType::float16 && dtype != DType::int64) continue;
        in_ranks(world.size(), [&](int rank) {
          for (const ReduceOp op : {ReduceOp::sum, ReduceOp::min, ReduceOp::max, ReduceOp::product}) {
            for (const bool in_place : {false, true}) {
              Job job(rank, OpType::allreduce, dtype, shapes, in_place, true);
              const bool scaled = op == ReduceOp::sum && (dtype == DType::float32 || dtype == DType::int64);
              for (Operation& operation : job.operations) {
                operation.spec.reduce_op = op;
                operation.spec.prescale = scaled ? 2.0 : 1.0;
                operation.spec.postscale = scaled ? 3.0 : 1.0;
              }
              CHECK_OK(mesh::allreduce(world[rank], job.batch));
              size_t index = 0;
              for (const Tensor& tensor : job.tensors) {
                for (int64_t i = 0; i < tensor.elements(); i += large ? 61 : medium ? 7 : 1) {
                  double want = reduced(op, world.size(), index, i, scaled ? 2.0 : 1.0) * (scaled ? 3.0 : 1.0);
                  if (dtype == DType::boolean) {
                    want = op == ReduceOp::sum || op == ReduceOp::max;
                    bool any = false, all = true;
                    for (int r = 0; r < world.size(); ++r) {
                      any = any || value_of(r, index, i) != 0;
                      all = all && value_of(r, index, i) != 0;
                    }
                    want = want != 0 ? any : all;
                  }
                  const size_t at = static_cast<size_t>(i) * size_of(dtype);
                  if (dtype == DType::uint8) want = static_cast<double>(static_cast<uint64_t>(want) & 0xff);
                  CHECK(get(dtype, (in_place ? tensor.input : tensor.output).data() + at) == want);
                  if (!in_place && dtype != DType::boolean)
                    CHECK(get(dtype, tensor.input.data() + at) == value_of(rank, index, i));
                }
                ++index;
              }
            }
          }
        });
      }
    }
  });
}

void test_average() {
  for (int n = 1; n <= 5; ++n) {
    World world(n);
    in_ranks(n, [&](int rank) {
      Job job(rank, OpType::allreduce, DType::float32, {{{100'001}}}, true, true);
      job.operations[0].spec.reduce_op = ReduceOp::average;
      CHECK_OK(mesh::allreduce(world[rank], job.batch));
      for (int64_t i = 0; i < 100'001; i += 97) {
        const float want = static_cast<float>(reduced(ReduceOp::sum, n, 0, i, 1)) * static_cast<float>(1.0 / n);
        CHECK(get_as<float>(job.tensors[0].input.data() + i * 4) == want);
      }
    });
  }
}

// The same numbers alone, fused, at another place of the batch, through another number of connections: the same bits.
void test_determinism() {
  for (const int n : {2, 3, 4, 5}) {
    const std::vector<int64_t> sizes = {3, 40'000, 1, 200'003, 17};
    std::vector<std::vector<std::vector<float>>> results;  // variant, tensor
    for (const int variant : {0, 1, 2, 3}) {
      World world(n, variant == 3 ? Wire::tcp : Wire::pair, variant == 3 ? 3 : 1);
      std::vector<std::vector<std::vector<float>>> data(n);
      std::vector<std::vector<float>> expected;
      for (int r = 0; r < n; ++r) {
        std::mt19937 random(static_cast<unsigned>(r));
        std::normal_distribution<float> normal(0, 1e3f);
        for (const int64_t size : sizes) {
          auto& tensor = data[r].emplace_back(static_cast<size_t>(size));
          for (float& x : tensor) x = normal(random) * std::exp(normal(random) / 300);
        }
      }
      for (size_t t = 0; t < sizes.size(); ++t) {  // strictly in rank order
        expected.push_back(data[0][t]);
        for (int r = 1; r < n; ++r) {
          for (size_t i = 0; i < expected[t].size(); ++i) expected[t][i] += data[r][t][i];
        }
      }
      in_ranks(n, [&](int rank) {
        std::deque<Operation> operations;
        std::vector<Operation*> batch;
        std::vector<size_t> order = {0, 1, 2, 3, 4};
        if (variant == 2) std::reverse(order.begin(), order.end());
        for (const size_t t : order) {
          Operation& operation = operations.emplace_back();
          auto* memory = reinterpret_cast<std::byte*>(data[rank][t].data());
          operation.spec.type = OpType::allreduce;
          operation.spec.reduce_op = ReduceOp::sum;
          operation.spec.tensors = {{DType::float32, {sizes[t]}}};
          operation.spans = {{memory, memory, sizes[t]}};
          batch.push_back(&operation);
          if (variant == 0) {
            CHECK_OK(mesh::allreduce(world[rank], batch));
            batch.clear();
          }
        }
        if (!batch.empty()) CHECK_OK(mesh::allreduce(world[rank], batch));
      });
      for (int r = 0; r < n; ++r) {
        for (size_t t = 0; t < sizes.size(); ++t) {
          CHECK(std::memcmp(data[r][t].data(), expected[t].data(), expected[t].size() * sizeof(float)) == 0);
        }
      }
    }
  }
}

void test_broadcast() {
  each_world([](World& world) {
    for (const Shapes& shapes : kShapes) {
      for (int root = 0; root < world.size(); ++root) {
        for (const bool in_place : {false, true}) {
          in_ranks(world.size(), [&](int rank) {
            Job job(rank, OpType::broadcast, DType::int32, shapes, in_place, true);
            for (Operation& operation : job.operations) operation.spec.root = root;
            CHECK_OK(mesh::broadcast(world[rank], job.batch));
            size_t index = 0;
            for (const Tensor& tensor : job.tensors) {
              for (int64_t i = 0; i < tensor.elements(); ++i) {
                CHECK(get(DType::int32, (in_place ? tensor.input : tensor.output).data() + i * 4) ==
                      value_of(root, index, i));
              }
              ++index;
            }
          });
        }
      }
    }
  });
  World many(11);  // the binomial tree
  for (const int root : {0, 4, 10}) {
    in_ranks(11, [&](int rank) {
      Job job(rank, OpType::broadcast, DType::int32, {{{100}}}, true, true);
      job.operations[0].spec.root = root;
      CHECK_OK(mesh::broadcast(many[rank], job.batch));
      for (int64_t i = 0; i < 100; ++i)
        CHECK(get(DType::int32, job.tensors[0].input.data() + i * 4) == value_of(root, 0, i));
    });
  }
}

void test_allgather() {
  each_world([](World& world) {
    const int n = world.size();
    for (const int64_t base : {0, 1, 40, 30'011}) {
      // Rank r has base + r rows of tensor 0, base * r of tensor 1 and none of tensor 2.
      const auto rows_of = [&](int rank, size_t t) { return t == 0 ? base + rank : t == 1 ? base * rank : 0; };
      in_ranks(n, [&](int rank) {
        Job job(rank, OpType::allgather, DType::int16,
                {{{rows_of(rank, 0), 3}, {rows_of(rank, 1)}}, {{rows_of(rank, 2), 2}}}, false, false);
        CHECK_OK(mesh::allgather(world[rank], job.batch));
        for (size_t t = 0; t < 3; ++t) {
          const OutputBuffer& output = t < 2 ? job.operations[0].outputs[t] : job.operations[1].outputs[0];
          const int64_t width = t == 0 ? 3 : t == 1 ? 1 : 2;
          int64_t at = 0;
          for (int r = 0; r < n; ++r) {
            for (int64_t i = 0; i < rows_of(r, t) * width; ++i, ++at) {
              CHECK(get(DType::int16, output.data.get() + at * 2) == value_of(r, t, i));
            }
          }
          CHECK(output.shape[0] == at / width && output.bytes == static_cast<size_t>(at) * 2);
          CHECK(output.shape.size() == (t == 1 ? 1u : 2u));
        }
      });
    }
  });
}

void test_alltoall() {
  each_world([](World& world) {
    const int n = world.size();
    for (const int64_t base : {0, 1, 300, 20'001}) {
      in_ranks(n, [&](int rank) {
        // Rank r sends base + (r + 2 p) % 3 rows to rank p, and two rows more are dropped.
        const auto part = [&](int from, int to) { return base + (from + 2 * to) % 3; };
        int64_t rows = 2;
        for (int p = 0; p < n; ++p) rows += part(rank, p);
        Job job(rank, OpType::alltoall, DType::float32, {{{rows, 2}}}, false, false);
        for (int p = 0; p < n; ++p) job.operations[0].splits.push_back(static_cast<int32_t>(part(rank, p)));
        CHECK_OK(mesh::alltoall(world[rank], job.batch));
        const OutputBuffer& output = job.operations[0].outputs[0];
        int64_t at = 0;
        for (int r = 0; r < n; ++r) {
          CHECK(job.operations[0].received_splits[r] == part(r, rank));
          int64_t first = 0;
          for (int p = 0; p < rank; ++p) first += part(r, p) * 2;
          for (int64_t i = 0; i < part(r, rank) * 2; ++i, ++at) {
            CHECK(get(DType::float32, output.data.get() + at * 4) == value_of(r, 0, first + i));
          }
        }
        CHECK(output.shape == (std::vector<int64_t>{at / 2, 2}));
        // Equal parts.
        Job equal(rank, OpType::alltoall, DType::float32, {{{base * n}}}, false, false);
        CHECK_OK(mesh::alltoall(world[rank], equal.batch));
        for (int64_t i = 0; i < base * n; ++i) {
          const int from = static_cast<int>(i / base);
          CHECK(get(DType::float32, equal.operations[0].outputs[0].data.get() + i * 4) ==
                value_of(from, 0, base * rank + i % base));
        }
      });
    }
  });
  World two(2);  // wrong splits are refused before anything is sent
  Job job(0, OpType::alltoall, DType::float32, {{{3}}}, false, false);
  CHECK(mesh::alltoall(two[0], job.batch).code() == Code::invalid_argument);
  job.operations[0].splits = {2, 2};
  CHECK(mesh::alltoall(two[0], job.batch).code() == Code::invalid_argument);
  job.operations[0].splits = {-1, 2};
  CHECK(mesh::alltoall(two[0], job.batch).code() == Code::invalid_argument);
}

void test_reducescatter() {
  each_world([](World& world) {
    const int n = world.size();
    for (const int64_t rows : {0, 1, 4, 11, 30'003}) {
      for (const DType dtype : {DType::float32, DType::bfloat16, DType::int64}) {
        in_ranks(n, [&](int rank) {
          Job job(rank, OpType::reducescatter, dtype, {{{rows, 3}, {7}}, {{rows + 2}}}, false, false);
          for (Operation& operation : job.operations) operation.spec.prescale = dtype == DType::float32 ? 2.0 : 1.0;
          CHECK_OK(mesh::reducescatter(world[rank], job.batch));
          size_t index = 0;
          for (Operation& operation : job.operations) {
            for (size_t t = 0; t < operation.outputs.size(); ++t, ++index) {
              const RowRange mine = split_rows(operation.spec.tensors[t].rows(), n, rank);
              const int64_t width = operation.spec.tensors[t].row_elements();
              CHECK(operation.outputs[t].shape[0] == mine.count);
              for (int64_t i = 0; i < mine.count * width; ++i) {
                CHECK(get(dtype, operation.outputs[t].data.get() + i * size_of(dtype)) ==
                      reduced(ReduceOp::sum, n, index, mine.first * width + i, operation.spec.prescale));
              }
            }
          }
        });
      }
    }
  });
}

// Members whose tensors do not fit together: a sentence, no crash, no hang.
void test_lengths_that_do_not_fit() {
  const auto run = [](const std::function<Status(Mesh&, int)>& body) {
    World world(2);
    std::vector<Status> results(2);
    in_ranks(2, [&](int rank) {
      results[rank] = body(world[rank], rank);
      if (!results[rank].ok()) world[rank].announce_end(ControlKind::abort, results[rank].message());
    });
    CHECK(!results[0].ok() || !results[1].ok());
    CHECK(contains(results[0].message() + results[1].message(), "the ranks do not"));
  };
  run([](Mesh& mesh, int rank) {
    Job job(rank, OpType::allreduce, DType::float32, {{{1000 + rank}}}, true, true);
    return mesh::allreduce(mesh, job.batch);
  });
  run([](Mesh& mesh, int rank) {
    Job job(rank, OpType::allreduce, DType::float32, {{{100'000 + 1000 * rank}}}, true, true);
    return mesh::allreduce(mesh, job.batch);
  });
  run([](Mesh& mesh, int rank) {
    Job job(rank, OpType::allgather, DType::float32, {{{4, 1 + rank}}}, false, false);
    return mesh::allgather(mesh, job.batch);
  });
}

// -- exchanges and control frames
// ---------------------------------------------------------------------------------------

// Everybody sends much to everybody at once while other threads send control frames: no deadlock, nothing mixed up.
void test_exchange_with_control_frames() {
  for (const int connections : {1, 3}) {
    constexpr int n = 4;
    constexpr size_t kBytes = 3'000'001;
    constexpr uint32_t kFrames = 300;
    World world(n, Wire::tcp, connections);
    in_ranks(n, [&](int rank) {
      std::thread talker([&] {
        for (uint32_t i = 0; i < kFrames; ++i) {
          const uint32_t ids[3] = {i, i + 1, i + 2};
          CHECK_OK(world[rank].send_control((rank + 1) % n, ControlKind::ready, ids));
          CHECK_OK(world[rank].send_control((rank + 2) % n, ControlKind::withdraw, {&i, 1}, "text"));
        }
      });
      std::vector<std::vector<uint8_t>> out(n), in(n);
      std::vector<Transfer> sends, receives;
      for (int p = 0; p < n; ++p) {
        if (p == rank) continue;
        out[p].resize(kBytes);
        in[p].resize(kBytes);
        for (size_t i = 0; i < kBytes; ++i)
          out[p][i] = static_cast<uint8_t>(i * 31 + i / 999 + static_cast<size_t>(rank * n + p));
        sends.push_back({p, {{out[p].data(), 1000}, {out[p].data() + 1000, 0}, {out[p].data() + 1000, kBytes - 1000}}});
        receives.push_back({p, {{in[p].data(), kBytes - 5}, {in[p].data() + kBytes - 5, 5}}});
      }
      for (int round = 0; round < 3; ++round) {
        for (auto& buffer : in) std::fill(buffer.begin(), buffer.end(), 0);
        CHECK_OK(world[rank].exchange(sends, receives));
        for (int p = 0; p < n; ++p) {
          for (size_t i = 0; i < in[p].size(); ++i) {
            CHECK(in[p][i] == static_cast<uint8_t>(i * 31 + i / 999 + static_cast<size_t>(p * n + rank)));
          }
        }
      }
      uint32_t ready = 0, withdraw = 0;
      while (ready < kFrames || withdraw < kFrames) {
        ControlFrame frame;
        bool found = false;
        CHECK_OK(world[rank].next_control(frame, found));
        if (!found) {
          CHECK_OK(world[rank].wait(1'000'000));
          continue;
        }
        if (frame.kind == ControlKind::ready) {
          CHECK(frame.peer == (rank + n - 1) % n && frame.ids == (std::vector<uint32_t>{ready, ready + 1, ready + 2}));
          ++ready;
        } else {
          CHECK(frame.peer == (rank + n - 2) % n && frame.ids == std::vector<uint32_t>{withdraw} &&
                frame.text == "text");
          ++withdraw;
        }
      }
      talker.join();
    });
  }
}

// A peer that is ahead: its data waits until the receive is started, and control frames behind it are not lost.
void test_early_data() {
  World world(3);
  std::vector<uint8_t> out(5'000), in(5'000), more(200'000, 9), much(200'000);
  for (size_t i = 0; i < out.size(); ++i) out[i] = static_cast<uint8_t>(i);
  Flight early;
  const Transfer send{0, {{out.data(), out.size()}}}, send_more{0, {{more.data(), more.size()}}};
  CHECK_OK(world[1].start({&send, 1}, {}, early));
  const uint32_t id = 5;
  CHECK_OK(world[1].send_control(0, ControlKind::ready, {&id, 1}));
  CHECK_OK(world[1].start({&send_more, 1}, {}, early));
  CHECK_OK(world[0].wait(1000));
  const Transfer receive{1, {{in.data(), in.size()}}}, receive_more{1, {{much.data(), much.size()}}};
  std::thread sender([&] { CHECK_OK(world[1].finish(early)); });
  CHECK_OK(world[0].exchange({}, {&receive, 1}));
  CHECK(in == out);
  CHECK_OK(world[0].exchange({}, {&receive_more, 1}));
  CHECK(much == more);
  sender.join();
  ControlFrame frame;
  bool found = false;
  CHECK_OK(world[0].next_control(frame, found));
  CHECK(found && frame.peer == 1 && frame.ids == std::vector<uint32_t>{5});
}

void test_wake() {
  World world(2);
  std::thread waker([&] { world[0].wake(); });
  CHECK_OK(world[0].wait(60'000'000));
  waker.join();
  world[0].wake();  // remembered, also across an exchange
  uint8_t out = 1, in = 0;
  const Transfer send{1, {{&out, 1}}}, receive{1, {{&in, 1}}};
  std::thread peer([&] {
    uint8_t theirs = 0;
    const Transfer back{0, {{&out, 1}}}, into{0, {{&theirs, 1}}};
    CHECK_OK(world[1].exchange({&back, 1}, {&into, 1}));
  });
  CHECK_OK(world[0].exchange({&send, 1}, {&receive, 1}));
  peer.join();
  CHECK_OK(world[0].wait(60'000'000));
}

// A full socket blocks no caller of send_control; the driver sends the rest when there is room.
void test_control_on_a_full_socket() {
  World world(2);
  std::vector<uint32_t> ids(kMaxIds);
  for (uint32_t i = 0; i < kMaxIds; ++i) ids[i] = i;
  constexpr int kFrames = 100;  // 6.5 MB, more than any socket takes
  for (int i = 0; i < kFrames; ++i) CHECK_OK(world[0].send_control(1, ControlKind::batch, ids));
  std::atomic<bool> done{false};
  std::thread driver([&] {
    while (!done) CHECK_OK(world[0].wait(10'000));
  });
  for (int i = 0; i < kFrames;) {
    ControlFrame frame;
    bool found = false;
    CHECK_OK(world[1].next_control(frame, found));
    if (!found) {
      CHECK_OK(world[1].wait(1'000'000));
      continue;
    }
    CHECK(frame.ids == ids);
    ++i;
  }
  done = true;
  world[0].wake();
  driver.join();
}

// -- endings
// ------------------------------------------------------------------------------------------------------------

Status receive_from(Mesh& mesh, int peer, size_t bytes) {
  std::vector<uint8_t> in(bytes);
  const Transfer receive{peer, {{in.data(), bytes}}};
  return mesh.exchange({}, {&receive, 1});
}
Status send_to(Mesh& mesh, int peer, size_t bytes) {
  std::vector<uint8_t> out(bytes, 3);
  const Transfer send{peer, {{out.data(), bytes}}};
  return mesh.exchange({&send, 1}, {});
}
Status wait_for_news(Mesh& mesh) {  // until wait() fails, taking frames
  for (;;) {
    ControlFrame frame;
    bool found = true;
    while (found) HVD_TRY(mesh.next_control(frame, found));
    HVD_TRY(mesh.wait(60'000'000));
  }
}

void test_lost_peer() {
  for (const Wire wire : {Wire::pair, Wire::tcp}) {
    for (const int connections : {1, 3}) {
      {
        World world(3, wire, connections);
        world.meshes[2].reset();
        Status status = receive_from(world[0], 2, 10);
        CHECK(status.code() == Code::aborted && contains(status.message(), label_of(2) + " was lost"));
        status = receive_from(world[0], 1, 10);  // final
        CHECK(contains(status.message(), label_of(2) + " was lost"));
        status = wait_for_news(world[1]);
        CHECK(contains(status.message(), label_of(2) + " was lost"));
      }
      {  // in the middle of a transfer, seen by a rank that waits for another one
        World world(3, wire, connections);
        std::thread victim([&] { (void)receive_from(world[0], 1, 10); });
        Flight flight;
        std::vector<uint8_t> out(64'000'000);
        const Transfer send{1, {{out.data(), out.size()}}};
        CHECK_OK(world[2].start({&send, 1}, {}, flight));
        std::thread receiver([&] {
          const Status status = receive_from(world[1], 2, out.size());
          CHECK(contains(status.message(), label_of(2) + " was lost"));
        });
        world.meshes[2].reset();
        receiver.join();
        victim.join();
      }
      {  // while sending to it
        World world(2, wire, connections);
        std::thread closer([&] { world.meshes[1].reset(); });
        const Status status = send_to(world[0], 1, 50'000'000);
        CHECK(contains(status.message(), label_of(1) + " was lost"));
        closer.join();
      }
    }
  }
}

void test_abort_frame_is_the_cause() {
  for (const int connections : {1, 3}) {
    World world(3, Wire::tcp, connections);
    // Rank 2 aborts; rank 1 hears of it and ends too, without having told rank 0 yet. Rank 0 must hear the root cause,
    // although it needs rank 1 and sees its connection end.
    world[2].announce_end(ControlKind::abort, "rank 2 ran out of patience");
    CHECK(contains(wait_for_news(world[1]).message(), "rank 2 ran out of patience"));
    world.meshes[1].reset();
    const Status status = receive_from(world[0], 1, 10);
    CHECK(status.code() == Code::aborted && contains(status.message(), "rank 2 ran out of patience"));
    CHECK(contains(send_to(world[0], 2, 10).message(), "rank 2 ran out of patience"));
  }
  {  // behind data that nobody has asked for
    World world(2, Wire::tcp, 2);
    Flight flight;
    std::vector<uint8_t> out(1'000);
    const Transfer send{0, {{out.data(), out.size()}}};
    CHECK_OK(world[1].start({&send, 1}, {}, flight));
    world[1].announce_end(ControlKind::abort, "the reason");
    world.meshes[1].reset();
    CHECK(contains(wait_for_news(world[0]).message(), "the reason"));
  }
  for (const int connections : {1, 3}) {  // in the middle of data
    World world(2, Wire::tcp, connections);
    Flight flight;
    std::vector<uint8_t> out(50'000'000);
    const Transfer send{0, {{out.data(), out.size()}}};
    CHECK_OK(world[1].start({&send, 1}, {}, flight));
    world.aborts[1].raise({Code::aborted, "the reason"});
    world[1].announce_end(ControlKind::abort, "the reason");
    std::thread aborter([&] { world[1].linger(60'000'000); });
    CHECK(receive_from(world[0], 1, out.size()).message() == "the reason");
    aborter.join();
    CHECK(world[1].finish(flight).message() == "the reason");
  }
  {  // the local abort signal
    World world(2);
    std::thread aborter([&] {
      world.aborts[0].raise({Code::interrupted, "Ctrl-C"});
      world[0].wake();
    });
    CHECK(receive_from(world[0], 1, 10).message() == "Ctrl-C");
    aborter.join();
    CHECK(world[0].wait(1000).message() == "Ctrl-C");
  }
}

void test_leave() {
  for (const int connections : {1, 3}) {
    World world(3, Wire::tcp, connections);
    constexpr size_t kBytes = 1'000'000;
    std::vector<uint8_t> out(kBytes, 42), in(kBytes);
    std::thread leaver([&] {
      const Transfer send{0, {{out.data(), kBytes}}};
      CHECK_OK(world[1].exchange({&send, 1}, {}));
      world[1].announce_end(ControlKind::leave, "");
      world.meshes[1].reset();
    });
    const Transfer receive{1, {{in.data(), kBytes}}};
    CHECK_OK(world[0].exchange({}, {&receive, 1}));  // sent before it left
    CHECK(in == out);
    leaver.join();
    ControlFrame frame;
    for (bool found = false; !found;) {
      CHECK_OK(world[0].wait(1'000'000));
      CHECK_OK(world[0].next_control(frame, found));
    }
    CHECK(frame.kind == ControlKind::leave && frame.peer == 1 && frame.text == label_of(1) + " has shut down.");
    CHECK_OK(world[0].wait(1000));  // that alone is no failure
    std::thread other([&] { CHECK_OK(send_to(world[2], 0, 10)); });
    CHECK_OK(receive_from(world[0], 2, 10));  // and the others go on
    other.join();
    const Status status = receive_from(world[0], 1, 10);
    CHECK(status.code() == Code::left && contains(status.message(), label_of(1) + " has shut down."));
  }
  {  // it leaves while we wait for it, or send to it
    for (const bool sending : {false, true}) {
      World world(2, Wire::tcp, 3);
      std::thread leaver([&] { world[1].announce_end(ControlKind::leave, "bye"); });
      const Status status = sending ? send_to(world[0], 1, 50'000'000) : receive_from(world[0], 1, 1'000'000);
      CHECK(contains(status.message(), label_of(1) + " has shut down: bye"));
      leaver.join();
    }
  }
}

void test_progress_timeout() {
  Config config;
  config.progress_timeout_ms = 120;
  World world(3, Wire::pair, 1, config);
  Status status = receive_from(world[0], 2, 10);
  CHECK(status.code() == Code::timeout && contains(status.message(), label_of(2) + " has made no progress"));
  CHECK(status.message().find("rank 1") == std::string::npos);
  status = send_to(world[1], 2, 50'000'000);
  CHECK(status.code() == Code::timeout && contains(status.message(), label_of(2) + " has made no progress"));
}

// A peer played by hand: whatever it writes, the answer is a sentence with its name.
void test_hostile_bytes() {
  using wire::FrameHeader;
  const auto header = [](auto change) {
    FrameHeader made;
    made.sender = 1;
    made.epoch = 7;
    made.length = 100;
    change(made);
    std::string bytes(reinterpret_cast<const char*>(&made), sizeof(made));
    return bytes.append(100, 'x');
  };
  struct Case {
    std::string bytes;
    std::string complaint;
  };
  const std::vector<Case> cases = {
      {std::string(64, 'G'), "no frame of the data plane"},
      {header([](FrameHeader& h) { h.epoch = 8; }), "epoch 8"},
      {header([](FrameHeader& h) { h.sender = 0; }), "in the name of rank 0"},
      {header([](FrameHeader& h) { h.length = 99; }), "99 bytes of transfer 0 where this rank expected 100"},
      {header([](FrameHeader& h) { h.sequence = 1; }), "transfer 1 where this rank expected 100 bytes of transfer 0"},
      {header([](FrameHeader& h) { h.length = 0; }), "data frame of 0 bytes"},
      {header([](FrameHeader& h) { h.length = ~uint64_t{0}; }), "data frame of"},
      {header([](FrameHeader& h) { h.kind = 8; }), "kind 8"},
      {header([](FrameHeader& h) { h.kind = 3, h.length = uint64_t{1} << 40; }), "control frame of"},
      {header([](FrameHeader& h) { h.kind = 3, h.length = 3; }), "control frame of 3 bytes"},
      {header([](FrameHeader& h) { h.kind = 3; }), "claims to hold"},
      {header([](FrameHeader& h) { h.kind = 3, h.sequence = 2; }), "control frame 2 where number 0"},
      {header([](FrameHeader&) {}).substr(0, 70), "was lost"},  // truncated
      {header([](FrameHeader&) {}).substr(0, 20), "was lost"},
      {"", "was lost"},
  };
  for (const Case& hostile : cases) {
    int fds[2];
    connect_pair(Wire::pair, fds);
    AbortSignal abort;
    Status status;
    auto mesh = Mesh::create(0, 7, {{label_of(0), {}}, {label_of(1), {fds[0]}}}, Config{}, abort, status);
    CHECK_OK(status);
    CHECK(write(fds[1], hostile.bytes.data(), hostile.bytes.size()) == static_cast<ssize_t>(hostile.bytes.size()));
    close(fds[1]);
    status = receive_from(*mesh, 1, 100);
    CHECK(status.code() == Code::aborted);
    CHECK(contains(status.message(), label_of(1)) && contains(status.message(), hostile.complaint));
  }
  // A connection that ends at every byte of a good stream of a control frame and a data frame.
  World world(2);
  const auto good = [&] {
    int fds[2];
    connect_pair(Wire::pair, fds);
    AbortSignal abort;
    Status status;
    auto mesh = Mesh::create(1, 7, {{label_of(0), {fds[0]}}, {label_of(1), {}}}, Config{}, abort, status);
    const uint32_t id = 3;
    CHECK_OK(mesh->send_control(0, ControlKind::ready, {&id, 1}, "t"));
    CHECK_OK(send_to(*mesh, 0, 50));
    std::string bytes(1000, 0);
    bytes.resize(static_cast<size_t>(read(fds[1], bytes.data(), bytes.size())));
    close(fds[1]);
    return bytes;
  }();
  for (size_t cut = 0; cut <= good.size(); ++cut) {
    int fds[2];
    connect_pair(Wire::pair, fds);
    AbortSignal abort;
    Status status;
    auto mesh = Mesh::create(0, 7, {{label_of(0), {}}, {label_of(1), {fds[0]}}}, Config{}, abort, status);
    CHECK(write(fds[1], good.data(), cut) == static_cast<ssize_t>(cut));
    close(fds[1]);
    status = receive_from(*mesh, 1, 50);
    CHECK(status.ok() == (cut == good.size()));
    if (!status.ok()) CHECK(contains(status.message(), label_of(1) + " was lost"));
  }
}

void test_descriptors() {
  const auto count = [] {
    int open = 0;
    for (int fd = 0; fd < 1024; ++fd) open += fcntl(fd, F_GETFD) >= 0;
    return open;
  };
  const int before = count();
  {
    World world(3, Wire::tcp, 2);
    const std::vector<int> fds = world.peers[0][1].fds;
    for (const int fd : fds) CHECK(fcntl(fd, F_GETFD) & FD_CLOEXEC);
    const pid_t child = fork();
    if (child == 0) {
      const bool gone = fcntl(fds[0], F_GETFD) < 0 && fcntl(fds[1], F_GETFD) < 0;
      const int reused = dup(1);
      world.meshes.clear();  // harmless: touches nothing that was opened since
      _exit(gone && fcntl(reused, F_GETFD) >= 0 ? 0 : 1);
    }
    int result = 0;
    CHECK(waitpid(child, &result, 0) == child && WIFEXITED(result) && WEXITSTATUS(result) == 0);
    std::thread peer([&] { CHECK_OK(send_to(world[1], 0, 1000)); });  // here everything still works
    CHECK_OK(receive_from(world[0], 1, 1000));
    peer.join();
  }
  CHECK(count() == before);
  // What is no stream socket is refused, and closed.
  int fds[2];
  CHECK(pipe(fds) == 0);
  AbortSignal abort;
  Status status;
  CHECK(!Mesh::create(0, 7, {{"me", {}}, {"them", {fds[0], fds[1]}}}, Config{}, abort, status));
  CHECK(status.code() == Code::invalid_argument && contains(status.message(), "them"));
  CHECK(!Mesh::create(0, 7, {{"me", {}}, {"them", {}}}, Config{}, abort, status) && contains(status.message(), "them"));
  CHECK(count() == before);
}

// -- the order log
// --------------------------------------------------------------------------------------------------------

const FuseRule kThree = [](const TensorId*, size_t count) { return std::min<size_t>(count, 3); };

// Every rank submits all ids of a round in its own order, from two threads, while the driver runs an allreduce for
// every batch: all ranks see the same batches in the same order, each id once a round.
void test_order_log() {
  for (const int n : {1, 2, 3, 5}) {
    constexpr uint32_t kIds = 40;
    constexpr int kRounds = 5;
    World world(n, Wire::tcp, n == 3 ? 2 : 1);
    std::vector<std::vector<std::vector<TensorId>>> seen(n);
    in_ranks(n, [&](int rank) {
      MeshOrderLog log(world[rank], kThree, world.aborts[rank]);
      std::mutex mutex;
      std::condition_variable changed;
      std::vector<int> done(kIds, 0);
      const auto submit = [&](unsigned seed, uint32_t first, uint32_t last) {
        std::mt19937 random(seed);
        std::vector<TensorId> ids;
        for (uint32_t id = first; id < last; ++id) ids.push_back(id * 400);
        for (int round = 0; round < kRounds; ++round) {
          std::shuffle(ids.begin(), ids.end(), random);
          for (const TensorId id : ids) {
            {
              std::unique_lock<std::mutex> lock(mutex);
              changed.wait(lock, [&] { return done[id / 400] == round; });
            }
            CHECK_OK(log.arrive(id));
          }
        }
      };
      std::thread first(submit, rank * 2, 0, kIds / 2), second(submit, rank * 2 + 1, kIds / 2, kIds);
      for (size_t total = 0; total < kIds * kRounds;) {
        LogEvent event;
        CHECK_OK(log.poll(event));
        if (event.kind == LogEvent::none) {
          CHECK_OK(log.wait(1'000'000));
          continue;
        }
        CHECK(event.kind == LogEvent::batch && !event.ids.empty() && event.ids.size() <= 3);
        seen[rank].push_back(event.ids);
        Job job(rank, OpType::allreduce, DType::int32, {{{static_cast<int64_t>(event.ids[0])}}}, true, true);
        CHECK_OK(mesh::allreduce(world[rank], job.batch));
        total += event.ids.size();
        const std::lock_guard<std::mutex> lock(mutex);
        for (const TensorId id : event.ids) ++done[id / 400];
        changed.notify_all();
      }
      first.join();
      second.join();
      if (rank != 0) return;
      // Nobody leaves before everybody has everything: the log of rank 0 goes last in this test.
    });
    for (int r = 1; r < n; ++r) CHECK(seen[r] == seen[0]);
  }
}

LogEvent next_event(MeshOrderLog& log) {
  LogEvent event;
  for (;;) {
    CHECK_OK(log.poll(event));
    if (event.kind != LogEvent::none) return event;
    CHECK_OK(log.wait(60'000'000));
  }
}

// Small operations whose bytes travel with their arrival; whether they do is each rank's own choice, and does not show
// in the results. Ids repeat, arrivals are taken back and come again with other bytes.
void test_eager() {
  for (const int n : {2, 3, 5}) {
    for (const int regretful : {0, 1, 2}) {  // in how many of ten rounds an arrival is taken back
      constexpr uint32_t kIds = 7;
      constexpr int kRounds = 150;
      World world(n, Wire::tcp, regretful == 1 ? 2 : 1);
      std::vector<std::atomic<int>> values(static_cast<size_t>(n) * kIds * kRounds);  // of each rank's last arrival
      std::atomic<int> completed{0}, withdrawn{0};
      in_ranks(n, [&](int rank) {
        std::mt19937 random(static_cast<unsigned>(rank * 10 + regretful));
        MeshOrderLog log(world[rank], kThree, world.aborts[rank]);
        struct Slot {
          Operation operation;
          float in[9], out[9];
          int round = -1;
        };
        std::vector<Slot> slots(kIds);
        const auto value = [&](int r, uint32_t id, int round) -> std::atomic<int>& {
          return values[(static_cast<size_t>(r) * kIds + id) * kRounds + static_cast<size_t>(round)];
        };
        const auto submit = [&](uint32_t id) {
          Slot& slot = slots[id];
          const int number = static_cast<int>(random() % 1000);
          value(rank, id, slot.round) = number;
          for (int i = 0; i < 9; ++i) slot.in[i] = static_cast<float>(number + i), slot.out[i] = -1;
          OpSpec& spec = slot.operation.spec;
          spec.type = id == 0 ? OpType::broadcast : OpType::allreduce;
          spec.root = n - 1;
          spec.reduce_op = id == 1 ? ReduceOp::max : ReduceOp::sum;
          spec.prescale = id == 2 ? 2.0 : 1.0;
          spec.postscale = id == 3 ? 0.5 : 1.0;
          spec.tensors = {{DType::float32, {4}}, {DType::float32, {5}}};
          slot.operation.spans.clear();
          for (const int first : {0, 4}) {
            float* in = slot.in + first;
            float* out = id % 2 == 0 ? in : slot.out + first;  // in place or not
            slot.operation.spans.push_back(
                {reinterpret_cast<std::byte*>(in), reinterpret_cast<std::byte*>(out), first == 0 ? 4 : 5});
          }
          CHECK_OK(random() % 4 == 0 && regretful > 0 ? log.arrive(id) : log.arrive_with(id, slot.operation));
        };
        const auto next = [&](uint32_t id) {
          ++slots[id].round;
          submit(id);
          if (static_cast<int>(random() % 10) < regretful) CHECK_OK(log.withdraw(id));
        };
        for (uint32_t id = 0; id < kIds; ++id) next(id);
        for (uint32_t done = 0; done < kIds * kRounds;) {
          const LogEvent event = next_event(log);
          if (event.kind == LogEvent::withdrawn) {
            ++withdrawn;
            submit(event.ids[0]);
            continue;
          }
          for (const uint32_t id : event.ids) {
            Slot& slot = slots[id];
            Operation* batch[] = {&slot.operation};
            if (event.completed) {
              ++completed;
            } else {
              CHECK_OK(id == 0 ? mesh::broadcast(world[rank], batch) : mesh::allreduce(world[rank], batch));
            }
            for (int i = 0; i < 9; ++i) {
              float want = 0;
              for (int r = 0; r < n; ++r) {
                const float x = static_cast<float>(value(r, id, slot.round) + i);
                want = id == 1 ? std::max(want, x) : want + x;
              }
              if (id == 0) want = static_cast<float>(value(n - 1, id, slot.round) + i);
              if (id == 2) want *= 2;
              if (id == 3) want /= 2;
              CHECK((id % 2 == 0 ? slot.in : slot.out)[i] == want);
            }
            ++done;
            if (slot.round + 1 < kRounds) next(id);
          }
        }
      });
      CHECK(completed > 0 && (regretful > 0 ? withdrawn > 0 : completed == n * static_cast<int>(kIds) * kRounds));
    }
  }
}

// Arrivals that are taken back while others arrive: every rank gets exactly one answer, and answers fit together.
void test_withdraw() {
  constexpr int n = 3;
  constexpr uint32_t kRounds = 200;
  World world(n);
  std::vector<std::vector<LogEvent::Kind>> answers(n);
  std::vector<int> batches(n);
  in_ranks(n, [&](int rank) {
    MeshOrderLog log(world[rank], kThree, world.aborts[rank]);
    for (uint32_t id = 0; id < kRounds; ++id) {
      CHECK_OK(log.arrive(id));
      const bool regrets = static_cast<int>(id % n) == rank;
      if (regrets) CHECK_OK(log.withdraw(id));
      LogEvent event = next_event(log);
      if (event.kind == LogEvent::withdrawn) {
        CHECK(regrets && event.ids == std::vector<TensorId>{id});
        answers[rank].push_back(event.kind);
        CHECK_OK(log.arrive(id));  // so that the others get their batch
        event = next_event(log);
      }
      CHECK(event.kind == LogEvent::batch && event.ids == std::vector<TensorId>{id});
      ++batches[rank];
    }
    if (rank == 0) return;
    LogEvent event;
    CHECK_OK(log.poll(event));
    CHECK(event.kind == LogEvent::none);
  });
  for (int r = 0; r < n; ++r) CHECK(batches[r] == kRounds);
  CHECK(answers[1].size() + answers[2].size() > 0);
}

void test_order_log_leave() {
  for (const int leaver : {0, 2}) {
    constexpr int n = 3;
    World world(n, Wire::tcp);
    in_ranks(n, [&](int rank) {
      MeshOrderLog log(world[rank], kThree, world.aborts[rank]);
      for (const TensorId id : {1u, 2u, 3u}) CHECK_OK(log.arrive(id));
      for (size_t got = 0; got < 3;) got += next_event(log).ids.size();  // all that was agreed
      if (rank == leaver) {
        world[rank].announce_end(ControlKind::leave, "");
        world.meshes[rank].reset();
        return;
      }
      CHECK_OK(log.arrive(4));
      for (;;) {
        LogEvent event;
        Status status = log.poll(event);
        CHECK_OK(status);
        CHECK(event.kind == LogEvent::none);
        status = log.wait(60'000'000);
        if (status.ok()) continue;
        CHECK(status.code() == Code::left && contains(status.message(), label_of(leaver) + " has shut down."));
        break;
      }
      if (leaver == 0) return;
      CHECK_OK(log.withdraw(4));  // still answered, if only locally
      LogEvent event;
      CHECK_OK(log.poll(event));
      CHECK(event.kind == LogEvent::withdrawn && event.ids == std::vector<TensorId>{4});
    });
  }
}

void test_order_log_failures() {
  {  // a lost and an aborting peer
    World world(3);
    std::vector<Status> results(3);
    in_ranks(3, [&](int rank) {
      if (rank == 2) {
        world[2].announce_end(ControlKind::abort, "out of memory on rank 2");
        world.meshes[2].reset();
        return;
      }
      MeshOrderLog log(world[rank], kThree, world.aborts[rank]);
      CHECK_OK(log.arrive(9));
      LogEvent event;
      do {
        results[rank] = log.poll(event);
        if (results[rank].ok()) results[rank] = log.wait(60'000'000);
      } while (results[rank].ok());
    });
    CHECK(contains(results[0].message(), "out of memory on rank 2"));
    CHECK(contains(results[1].message(), "out of memory on rank 2"));
  }
  {  // frames that make no sense
    for (const bool at_sequencer : {true, false}) {
      for (const uint32_t id : {3u, kMaxIds}) {
        World world(2);
        const int target = at_sequencer ? 0 : 1;
        MeshOrderLog log(world[target], kThree, world.aborts[target]);
        const auto kind = at_sequencer == (id != 3u) ? ControlKind::ready : ControlKind::batch;  // the wrong one for 3
        CHECK_OK(world[1 - target].send_control(target, kind, {&id, 1}));
        LogEvent event;
        Status status;
        while (status.ok()) {
          status = log.poll(event);
          if (status.ok()) status = log.wait(1'000'000);
        }
        CHECK(contains(status.message(), "this epoch can't go on"));
      }
    }
  }
  // Small data that is cut off, of no id, of no arrival, or of another length than here.
  const std::string bytes(16, 'x');
  for (const int fault : {0, 1, 2, 3}) {
    World world(2);
    std::string text;
    mesh::append_contribution(text, fault == 1 ? kMaxIds : fault == 2 ? 8 : 9, 0, bytes);
    if (fault == 0) text.pop_back();
    MeshOrderLog log(world[0], kThree, world.aborts[0]);
    Job job(0, OpType::allreduce, DType::float32, {{{5}}}, true, true);
    CHECK_OK(log.arrive_with(9, job.operations[0]));
    const uint32_t id = 9;
    CHECK_OK(world[1].send_control(0, ControlKind::ready, {&id, 1}, text));
    LogEvent event;
    Status status;
    while (status.ok()) {
      status = log.poll(event);
      if (status.ok()) status = log.wait(1'000'000);
    }
    CHECK(contains(status.message(), "epoch"));
  }
  World world(2);
  MeshOrderLog log(world[0], kThree, world.aborts[0]);
  CHECK(log.arrive(kMaxIds).code() == Code::invalid_argument);
  CHECK_OK(log.arrive(1));
  CHECK(log.arrive(1).code() == Code::internal);
}

// -- benchmark
// --------------------------------------------------------------------------------------------------------------

double cpu_s() {
  rusage used{};
  getrusage(RUSAGE_SELF, &used);
  return static_cast<double>(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
         static_cast<double>(used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6;
}
double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// One rank of the benchmark. Prints algorithm bandwidth; small sizes also with the order log.
void bench_rank(Mesh& mesh, AbortSignal& abort, size_t least, size_t most) {
  const int n = mesh.size();
  MeshOrderLog log(mesh, kThree, abort);
  const auto measure = [&](const char* what, size_t bytes, const std::function<void()>& run) {
    for (int i = 0; i < (bytes > (1u << 24) ? 1 : 5); ++i) run();
    std::vector<double> times;
    const int repeats = bytes <= 65536 ? 1000 : bytes <= (1u << 20) ? 200 : bytes <= (1u << 24) ? 25 : 4;
    const double cpu_before = cpu_s();
    for (int i = 0; i < repeats; ++i) {
      const double start = now_s();
      run();
      times.push_back(now_s() - start);
    }
    const double cpu = (cpu_s() - cpu_before) / repeats;
    std::sort(times.begin(), times.end());
    const double median = times[times.size() / 2];
    const double best = times[times.size() / 20];
    if (mesh.rank() != 0) return;
    std::printf("  %-14s %10zu B  median %10.1f us  best %10.1f us  cpu %9.1f us  %6.2f GB/s\n", what, bytes,
                median * 1e6, best * 1e6, cpu * 1e6, static_cast<double>(bytes) / median / 1e9);
    std::fflush(stdout);
  };
  for (const size_t bytes :
       {size_t{4}, size_t{1} << 14, size_t{1} << 17, size_t{1} << 20, size_t{1} << 24, size_t{1} << 28}) {
    if (bytes < least || bytes > most) continue;
    std::vector<float> data(bytes / 4, 1.0f);
    Operation operation;
    operation.spec.type = OpType::allreduce;
    operation.spec.reduce_op = ReduceOp::max;
    operation.spec.tensors = {{DType::float32, {static_cast<int64_t>(bytes / 4)}}};
    auto* memory = reinterpret_cast<std::byte*>(data.data());
    operation.spans = {{memory, memory, static_cast<int64_t>(bytes / 4)}};
    Operation* batch[] = {&operation};
    if (bytes <= (16u << 10)) {
      measure("log+allreduce", bytes, [&] {
        CHECK_OK(log.arrive_with(1, operation));
        if (!next_event(log).completed) CHECK_OK(mesh::allreduce(mesh, batch));
      });
    }
    measure("allreduce", bytes, [&] { CHECK_OK(mesh::allreduce(mesh, batch)); });
    measure("broadcast", bytes, [&] { CHECK_OK(mesh::broadcast(mesh, batch)); });
    operation.spans[0].output = nullptr;
    operation.spec.tensors[0].shape[0] = std::max<int64_t>(1, operation.spec.tensors[0].shape[0] / n);
    measure("allgather", bytes, [&] { CHECK_OK(mesh::allgather(mesh, batch)); });
  }
  std::vector<Transfer> all;  // nobody leaves before all have finished
  uint8_t byte = 0;
  for (int p = 0; p < n; ++p) {
    if (p != mesh.rank()) all.push_back({p, {{&byte, 1}}});
  }
  CHECK_OK(mesh.exchange(all, all));
  mesh.announce_end(ControlKind::leave, "");
}

// Ranks are processes, as in real life.
void bench(size_t least, size_t most) {
  for (const int n : {2, 4}) {
    for (const int connections : {1, 2}) {
      std::printf("%d ranks, %d connection%s per pair\n", n, connections, connections > 1 ? "s" : "");
      std::fflush(stdout);
      auto peers = connect_all(n, Wire::tcp, connections);
      std::vector<pid_t> children;
      for (int rank = 0; rank < n; ++rank) {
        const pid_t child = fork();
        CHECK(child >= 0);
        if (child > 0) {
          children.push_back(child);
          continue;
        }
        for (int r = 0; r < n; ++r) {
          for (const MeshPeer& peer : peers[r]) {
            for (const int fd : peer.fds) {
              if (r != rank) close(fd);
            }
          }
        }
        AbortSignal abort;
        Status status;
        Config config;
        if (const char* spin = std::getenv("MESH_BENCH_SPIN_US")) config.spin_us = std::atol(spin);
        auto mesh = Mesh::create(rank, 7, peers[rank], config, abort, status);
        CHECK_OK(status);
        bench_rank(*mesh, abort, least, most);
        mesh.reset();
        _exit(0);
      }
      for (const auto& mine : peers) {
        for (const MeshPeer& peer : mine) {
          for (const int fd : peer.fds) close(fd);
        }
      }
      for (const pid_t child : children) {
        int result = 0;
        CHECK(waitpid(child, &result, 0) == child && result == 0);
      }
    }
  }
}

struct Test {
  const char* name;
  void (*run)();
};
const Test kTests[] = {
    {"allreduce", test_allreduce},
    {"average", test_average},
    {"determinism", test_determinism},
    {"broadcast", test_broadcast},
    {"allgather", test_allgather},
    {"alltoall", test_alltoall},
    {"reducescatter", test_reducescatter},
    {"lengths_that_do_not_fit", test_lengths_that_do_not_fit},
    {"exchange_with_control_frames", test_exchange_with_control_frames},
    {"early_data", test_early_data},
    {"wake", test_wake},
    {"control_on_a_full_socket", test_control_on_a_full_socket},
    {"lost_peer", test_lost_peer},
    {"abort_frame_is_the_cause", test_abort_frame_is_the_cause},
    {"leave", test_leave},
    {"progress_timeout", test_progress_timeout},
    {"hostile_bytes", test_hostile_bytes},
    {"descriptors", test_descriptors},
    {"order_log", test_order_log},
    {"withdraw", test_withdraw},
    {"eager", test_eager},
    {"order_log_leave", test_order_log_leave},
    {"order_log_failures", test_order_log_failures},
};

}  // namespace

int main(int argc, char** argv) {
  const std::string wanted = argc > 1 ? argv[1] : "";
  if (wanted == "--bench") {
    bench(argc > 2 ? std::strtoul(argv[2], nullptr, 10) : 0,
          argc > 3 ? std::strtoul(argv[3], nullptr, 10) : size_t{1} << 28);
    return 0;
  }
  for (const Test& test : kTests) {
    if (std::string(test.name).find(wanted) == std::string::npos) continue;
    const double start = now_s();
    test.run();
    std::printf("ok %s (%.2f s)\n", test.name, now_s() - start);
    std::fflush(stdout);
  }
  return 0;
}
