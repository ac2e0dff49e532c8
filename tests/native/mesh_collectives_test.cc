// Collectives over the TCP data plane, without Python: ranks are threads, results are compared with a scalar oracle.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "collectives/mesh/collectives.h"
#include "mesh_job.h"
#include "mesh_world.h"
#include "named_tests.h"
#include "transport/packets.h"

using namespace horovod;
using namespace horovod::testing;

namespace {

// What is little more than some chunks goes with the last of them.
constexpr int64_t kMost = 2 * packets::kBytes;
static_assert(packets::whole(200 << 10) == 3 * packets::kBytes && packets::whole(5000) == 5000);
static_assert(packets::chunk_count(256 << 10, kMost) == 2);             // the second has 4 KB more than the first
static_assert(packets::chunk_count(256 << 10, kMost, 127 << 10) == 3);  // no room for that
static_assert(packets::chunk_count(1 << 20, kMost) == 8);               // 16 KB more
static_assert(packets::chunk_count(kMost + kMost / 4, kMost) == 1 &&
              packets::chunk_count(kMost + kMost / 4 + 1, kMost) == 2);
static_assert(packets::chunk_count(2 * kMost, kMost) == 2 && packets::chunk_count(1, kMost) == 1);

const std::vector<DType> kDTypes = {DType::float32, DType::int64,   DType::float16, DType::bfloat16, DType::uint8,
                                    DType::boolean, DType::float64, DType::int32,   DType::uint64};

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
    for (const Status& result : results) {
      CHECK(result.ok() || ends_with(result, error_code::unexpected_data));
    }
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

const NamedTest kTests[] = {
    {"allreduce", test_allreduce},         {"average", test_average},
    {"determinism", test_determinism},     {"broadcast", test_broadcast},
    {"allgather", test_allgather},         {"alltoall", test_alltoall},
    {"reducescatter", test_reducescatter}, {"lengths_that_do_not_fit", test_lengths_that_do_not_fit},
};

}  // namespace

int main(int argc, char** argv) { return run_named(argc, argv, kTests); }
