// Reductions over a sparse mesh: ranks are threads, results are compared bit for bit with the definition of the order
// (balanced.h), integers with plain arithmetic as well.
#include <algorithm>
#include <cmath>
#include <deque>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "collectives/adasum.h"
#include "collectives/mesh/eager.h"
#include "collectives/sparse/balanced.h"
#include "collectives/sparse/collectives.h"
#include "kernels/kernels.h"
#include "mesh_job.h"
#include "named_tests.h"
#include "sparse_world.h"

using namespace horovod;
using namespace horovod::testing;

namespace {

using Shapes = std::vector<std::vector<std::vector<int64_t>>>;  // of each tensor of each operation
using Bytes = std::vector<std::byte>;

const std::vector<DType> kDTypes = {DType::float32, DType::bfloat16, DType::float16, DType::int32,
                                    DType::boolean, DType::float64,  DType::uint8,   DType::int64};

std::vector<int> apart(int n) {
  std::vector<int> host_of(static_cast<size_t>(n));
  std::iota(host_of.begin(), host_of.end(), 0);
  return host_of;
}

std::vector<std::vector<int>> each_alone() {
  std::vector<std::vector<int>> layouts;
  for (const int n : {2, 3, 4, 5, 6, 7, 8, 11, 16}) layouts.push_back(apart(n));
  return layouts;
}
// Hosts with equal and unequal numbers of ranks, in order and not, some of them with one rank.
const std::vector<std::vector<int>> kShared = {{0, 0, 1, 1},
                                               {0, 0, 0, 1, 1},
                                               {0, 1, 1, 2, 0},
                                               {0, 1, 0, 1, 2, 2},
                                               {0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1},
                                               {0, 0, 1, 2, 2},
                                               {0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 4}};

void each_layout(const std::function<void(SparseWorld&)>& body) {
  for (const std::vector<std::vector<int>>& layouts : {each_alone(), kShared}) {
    for (const std::vector<int>& layout : layouts) {
      SparseWorld world(layout);
      body(world);
    }
  }
}

// Such that another order of summation, or a rounding more, changes bits of a floating-point sum.
void fill(Tensor& tensor, unsigned seed) {
  std::mt19937 random(seed);
  for (int64_t i = 0; i < tensor.elements(); ++i) {
    const int exponent = static_cast<int>(random() % 13) - 6;
    const double mantissa = 1.0 + static_cast<double>(random() % 4096) / 4096.0;
    double value = std::ldexp(random() % 2 ? mantissa : -mantissa, exponent);
    if (tensor.dtype == DType::boolean || tensor.dtype == DType::uint8) value = random() % 7 == 0;
    put(tensor.dtype, tensor.input.data() + static_cast<size_t>(i) * size_of(tensor.dtype), value);
  }
}

struct Factors {
  ReduceOp op = ReduceOp::sum;
  double prescale = 1.0;
  double postscale = 1.0;
};

// The operations of all ranks, and copies of their inputs.
struct Jobs {
  Jobs(int n, OpType type, DType dtype, const Shapes& shapes, bool in_place, const Factors& factors) {
    for (int rank = 0; rank < n; ++rank) {
      Job& job = jobs.emplace_back(rank, type, dtype, shapes, in_place, type == OpType::allreduce);
      unsigned index = 0;
      for (Tensor& tensor : job.tensors) {
        fill(tensor, static_cast<unsigned>(rank) * 1000 + index++);
        inputs.push_back(tensor.input);
      }
      for (Operation& operation : job.operations) {
        operation.spec.reduce_op = factors.op;
        operation.spec.prescale = factors.prescale;
        operation.spec.postscale = factors.postscale;
      }
    }
  }
  size_t tensors() const { return jobs[0].tensors.size(); }
  const Bytes& input(int rank, size_t tensor) const { return inputs[static_cast<size_t>(rank) * tensors() + tensor]; }

  std::deque<Job> jobs;  // by rank
  std::vector<Bytes> inputs;
};

// The definition: prescaled, reduced within each host, and then in the balanced order.
Bytes expected(const Jobs& jobs, size_t tensor, const Hosts& hosts) {
  const Tensor& like = jobs.jobs[0].tensors[tensor];
  const OpSpec& spec = jobs.jobs[0].operations[0].spec;
  const Reduction reduction = Reduction::of(spec, hosts.size());
  const auto count = static_cast<size_t>(like.elements());
  std::vector<Bytes> by_host;
  for (int host = 0; host < hosts.count(); ++host) {
    std::vector<Bytes> scaled;
    std::vector<const void*> here;
    for (const int member : hosts.members(host)) {
      Bytes& input = scaled.emplace_back(jobs.input(member, tensor));
      kernels::scale(like.dtype, input.data(), input.data(), count, reduction.prescale);
    }
    for (const Bytes& input : scaled) here.push_back(input.data());
    Bytes& sum = by_host.emplace_back(like.input.size());
    kernels::reduce(like.dtype, reduction.op, sum.data(), here.data(), static_cast<int>(here.size()), count, 1.0);
  }
  std::vector<const void*> sums;
  for (const Bytes& sum : by_host) sums.push_back(sum.data());
  Bytes result(like.input.size());
  sparse::reduce_balanced(reduction, result.data(), sums.data(), hosts.count(), like.elements());
  return result;
}

void check_allreduce(SparseWorld& world, DType dtype, const Shapes& shapes, bool in_place, const Factors& factors) {
  Jobs jobs(world.size(), OpType::allreduce, dtype, shapes, in_place, factors);
  in_ranks(world.size(),
           [&](int rank) { CHECK_OK(sparse::allreduce(world.hierarchies[rank], jobs.jobs[rank].batch)); });
  for (size_t t = 0; t < jobs.tensors(); ++t) {
    const Bytes want = expected(jobs, t, world.hosts);
    for (int rank = 0; rank < world.size(); ++rank) {
      const Tensor& tensor = jobs.jobs[rank].tensors[t];
      CHECK((in_place ? tensor.input : tensor.output) == want, "%d ranks on %d hosts, rank %d, dtype %d, tensor %zu",
            world.size(), world.hosts.count(), rank, static_cast<int>(dtype), t);
      CHECK(in_place || tensor.input == jobs.input(rank, t));
    }
    if (dtype != DType::int32 || factors.op != ReduceOp::sum || factors.prescale * factors.postscale != 1.0) continue;
    for (size_t at = 0; at < want.size(); at += sizeof(int32_t)) {
      double sum = 0;
      for (int rank = 0; rank < world.size(); ++rank) sum += get(dtype, jobs.input(rank, t).data() + at);
      CHECK(get(dtype, want.data() + at) == sum);
    }
  }
}

const Shapes kSmall = {{{7}}, {{0, 3}, {2, 5}}, {{1}}, {{13}, {1001}}};
const Factors kPlain, kScaled{ReduceOp::sum, 0.3, 0.7}, kAverage{ReduceOp::average, 1.0, 1.0};

void test_allreduce() {
  each_layout([](SparseWorld& world) {
    for (const DType dtype : kDTypes) {
      for (const bool in_place : {false, true}) {
        check_allreduce(world, dtype, kSmall, in_place, kPlain);
        if (dtype != DType::boolean) check_allreduce(world, dtype, kSmall, in_place, kScaled);
      }
      if (dtype != DType::boolean) check_allreduce(world, dtype, {{{100}}, {{3}}}, true, kAverage);
      check_allreduce(world, dtype, {{{333}}}, false, {ReduceOp::max});
      check_allreduce(world, dtype, {{{333}}}, true, {ReduceOp::product});
      check_allreduce(world, dtype, {{{0}}, {{0, 2}}}, true, kPlain);
    }
  });
}

// Past the limit of doubling, with several pieces in a step, and between the two.
void test_large_allreduce() {
  each_layout([](SparseWorld& world) {
    for (const DType dtype : {DType::float32, DType::bfloat16, DType::int32}) {
      check_allreduce(world, dtype, {{{70'001}}, {{5}}}, dtype == DType::int32, kPlain);
    }
    const int n = world.size();
    if (n > 8) return;
    check_allreduce(world, DType::float32, {{{100'007}}, {{5}, {99'991, 3}}, {{1, 1}}}, n % 2 == 0,
                    n % 4 < 2 ? kScaled : kAverage);
  });
}

void test_very_large_allreduce() {
  for (const std::vector<int>& layout : {apart(2), apart(3), apart(4), kShared[1]}) {
    SparseWorld world(layout, {}, Wire::tcp);
    check_allreduce(world, DType::float32, {{{1'500'001}}}, layout.size() % 2 == 0, kPlain);
  }
}

void check_reducescatter(SparseWorld& world, DType dtype, const Shapes& shapes, const Factors& factors) {
  const int n = world.size();
  Jobs jobs(n, OpType::reducescatter, dtype, shapes, false, factors);
  in_ranks(n, [&](int rank) { CHECK_OK(sparse::reducescatter(world.hierarchies[rank], jobs.jobs[rank].batch)); });
  const Hosts flat(apart(n));
  size_t index = 0;
  for (size_t o = 0; o < shapes.size(); ++o) {
    for (size_t t = 0; t < shapes[o].size(); ++t, ++index) {
      const Bytes want = expected(jobs, index, flat);
      for (int rank = 0; rank < n; ++rank) {
        const Operation& operation = jobs.jobs[rank].operations[o];
        const RowRange mine = split_rows(operation.spec.tensors[t].rows(), n, rank);
        const size_t row = static_cast<size_t>(operation.spec.tensors[t].row_elements()) * size_of(dtype);
        const OutputBuffer& output = operation.outputs[t];
        CHECK(output.shape[0] == mine.count && output.bytes == static_cast<size_t>(mine.count) * row);
        CHECK(std::equal(output.data.get(), output.data.get() + output.bytes,
                         want.data() + static_cast<size_t>(mine.first) * row),
              "%d ranks, rank %d, dtype %d, tensor %zu", n, rank, static_cast<int>(dtype), index);
        CHECK(jobs.jobs[rank].tensors[index].input == jobs.input(rank, index));
      }
    }
  }
}

void test_reducescatter() {
  each_layout([](SparseWorld& world) {
    for (const DType dtype : kDTypes) {
      for (const int64_t rows : {0, 1, 4, 11, 40}) {
        check_reducescatter(world, dtype, {{{rows, 3}, {7}}, {{rows + 2}}}, kPlain);
      }
      if (dtype != DType::boolean) check_reducescatter(world, dtype, {{{11, 3}, {7}}, {{50}}}, kScaled);
    }
    check_reducescatter(world, DType::float32, {{{30'003, 3}, {7}}, {{30'001}}}, kAverage);
  });
}

// In several segments, also with rows of very different sizes in one of them.
void test_large_reducescatter() {
  for (const int n : {2, 3, 5}) {
    SparseWorld world(apart(n), {}, Wire::tcp);
    check_reducescatter(world, DType::float32, {{{2'500'001}}, {{1, 1000}}}, kPlain);
    check_reducescatter(world, DType::bfloat16, {{{2, 1'500'000}}, {{10, 7}}}, kScaled);
  }
}

// What small operations come to without a data phase has the same bits.
void test_eager() {
  for (const std::vector<std::vector<int>>& layouts : {each_alone(), kShared}) {
    for (const std::vector<int>& layout : layouts) {
      const Hosts hosts(layout);
      for (const DType dtype : kDTypes) {
        for (const Factors& factors : {kPlain, kScaled, kAverage}) {
          if (dtype == DType::boolean && factors.op == ReduceOp::average) continue;
          Jobs jobs(hosts.size(), OpType::allreduce, dtype, {{{7}, {0, 2}, {1500}}}, false, factors);
          std::vector<std::string> by_host;
          for (int host = 0; host < hosts.count(); ++host) {
            std::vector<std::string> here;
            for (const int member : hosts.members(host)) {
              here.push_back(mesh::pack_eager(jobs.jobs[member].operations[0], member));
            }
            CHECK_OK(mesh::combine_host(jobs.jobs[0].operations[0], hosts, host, here, by_host.emplace_back()));
          }
          Operation& operation = jobs.jobs[hosts.size() - 1].operations[0];
          CHECK_OK(mesh::run_eager(operation, by_host, &hosts, mesh::Order::balanced));
          for (size_t t = 0; t < jobs.tensors(); ++t) {
            CHECK(jobs.jobs[hosts.size() - 1].tensors[t].output == expected(jobs, t, hosts));
          }
        }
      }
    }
  }
}

// The definition itself, of sums whose order shows: 2^24 + 1 is 2^24 in float32.
void test_the_order() {
  const float big = 16777216.0f;
  const auto sum = [](const std::vector<float>& values, double postscale = 1.0) {
    std::vector<const void*> inputs;
    for (const float& value : values) inputs.push_back(&value);
    float result = 0;
    sparse::reduce_balanced({DType::float32, ReduceOp::sum, 1.0, postscale}, reinterpret_cast<std::byte*>(&result),
                            inputs.data(), static_cast<int>(values.size()), 1);
    return result;
  };
  CHECK(sum({3.0f}, 2.0) == 6.0f);
  CHECK(sum({big, 1.0f, 1.0f, 0.0f}) == big);      // (big + 1) + (1 + 0)
  CHECK(sum({big, 0.0f, 1.0f, 1.0f}) == big + 2);  // (big + 0) + (1 + 1)
  CHECK(sum({1.0f, big, 1.0f}) == big + 2);        // (1 + 1) + big: the third host is folded into the first
  CHECK(sum({big, 1.0f, 1.0f}) == big);            // (big + 1) + 1
  CHECK(sum({big, 0.0f, 1.0f, 1.0f}, 0.5) == big / 2 + 1);
}

// Adasum has the bits that it has over a full mesh.
void test_adasum() {
  for (const std::vector<std::vector<int>>& layouts : {each_alone(), kShared}) {
    for (const std::vector<int>& layout : layouts) {
      SparseWorld sparse_world(layout);
      World full(sparse_world.size());
      for (const DType dtype : {DType::float32, DType::bfloat16}) {
        for (const Shapes& shapes : {Shapes{{{1001}, {0}, {3, 7}}}, Shapes{{{70'001}, {5}}}}) {
          const Factors factors{ReduceOp::adasum, dtype == DType::float32 ? 1.0 : 0.5, 3.0};
          Jobs one(full.size(), OpType::allreduce, dtype, shapes, true, factors);
          Jobs other(full.size(), OpType::allreduce, dtype, shapes, false, factors);
          in_ranks(full.size(), [&](int rank) {
            DataPlane plane;
            plane.mesh = full.meshes[rank].get();
            CHECK_OK(adasum(plane, one.jobs[rank].batch));
            CHECK_OK(adasum(sparse_world.plane(rank), other.jobs[rank].batch));
          });
          for (int rank = 0; rank < full.size(); ++rank) {
            for (size_t t = 0; t < one.tensors(); ++t) {
              CHECK(other.jobs[rank].tensors[t].output == one.jobs[0].tensors[t].input, "%d ranks, rank %d, tensor %zu",
                    full.size(), rank, t);
            }
          }
        }
      }
    }
  }
}

// The leaders of the hosts by themselves.
void test_adasum_of_leaders() {
  for (const std::vector<int>& layout : kShared) {
    SparseWorld world(layout);
    const int hosts = world.hosts.count();
    World full(hosts);
    const Shapes shapes = {{{1001}, {0}, {3, 7}}};
    Jobs one(hosts, OpType::allreduce, DType::float32, shapes, true, {ReduceOp::adasum});
    Jobs other(hosts, OpType::allreduce, DType::float32, shapes, false, {ReduceOp::adasum});
    in_ranks(hosts, [&](int host) {
      DataPlane plane;
      plane.mesh = full.meshes[host].get();
      CHECK_OK(adasum(plane, one.jobs[host].batch));
      plane.mesh = world.meshes[world.hosts.leader(host)].get();
      for (int leader = 0; leader < hosts; ++leader) plane.members.push_back(world.hosts.leader(leader));
      CHECK_OK(adasum(plane, other.jobs[host].batch));
    });
    for (int host = 0; host < hosts; ++host) {
      for (size_t t = 0; t < one.tensors(); ++t) {
        CHECK(other.jobs[host].tensors[t].output == one.jobs[0].tensors[t].input);
      }
    }
  }
}

// Members whose tensors do not fit together: a sentence, no crash, no hang.
void test_lengths_that_do_not_fit() {
  for (const int64_t count : {1000, 100'000}) {
    SparseWorld world(apart(4));
    std::vector<Status> results(4);
    in_ranks(4, [&](int rank) {
      Job job(rank, OpType::allreduce, DType::float32, {{{count + (rank == 2 ? 300 : 0)}}}, true, true);
      results[rank] = sparse::allreduce(world.hierarchies[rank], job.batch);
      if (!results[rank].ok()) world[rank].announce_end(ControlKind::abort, results[rank].message());
    });
    CHECK(std::any_of(results.begin(), results.end(), [](const Status& result) { return !result.ok(); }));
    for (const Status& result : results) CHECK(result.ok() || ends_with(result, error_code::unexpected_data));
  }
}

const NamedTest kTests[] = {
    {"the_order", test_the_order},
    {"eager", test_eager},
    {"allreduce", test_allreduce},
    {"large_allreduce", test_large_allreduce},
    {"very_large_allreduce", test_very_large_allreduce},
    {"reducescatter", test_reducescatter},
    {"large_reducescatter", test_large_reducescatter},
    {"lengths_that_do_not_fit", test_lengths_that_do_not_fit},
    {"adasum", test_adasum},
    {"adasum_of_leaders", test_adasum_of_leaders},
};

}  // namespace

int main(int argc, char** argv) { return run_named(argc, argv, kTests); }
