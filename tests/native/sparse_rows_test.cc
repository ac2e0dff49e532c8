// Allgather, alltoall and broadcast over sparse meshes, where members have connections to their partners only. Ranks
// are threads.
#include <algorithm>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "check.h"
#include "collectives/sparse/announcement.h"
#include "collectives/sparse/collectives.h"
#include "mesh_job.h"
#include "mesh_world.h"
#include "named_tests.h"

using namespace horovod;
using namespace horovod::testing;

namespace {

using Shapes = std::vector<std::vector<std::vector<int64_t>>>;
using Collective = Status (*)(Hierarchy&, Batch);

Status run(Collective collective, Mesh& mesh, Batch batch) {
  Hierarchy hierarchy{&mesh, nullptr, hosts_of_mesh(mesh.size(), {}), 0};
  return collective(hierarchy, batch);
}

// Differs by sender, receiver (or tensor) and place, over all values of a byte.
uint8_t byte_of(int rank, size_t tensor, int64_t i) {
  return static_cast<uint8_t>(static_cast<uint64_t>(i) * 131 + static_cast<uint64_t>(i >> 8) * 17 + tensor * 59 +
                              static_cast<uint64_t>(rank) * 101);
}

// Tensors of bytes, each filled with byte_of(rank, its index in the batch, place).
Job bytes_of(int rank, OpType type, const Shapes& shapes, bool has_output = false) {
  Job job(rank, type, DType::uint8, shapes, false, has_output);
  for (size_t t = 0; t < job.tensors.size(); ++t) {
    std::vector<std::byte>& input = job.tensors[t].input;
    for (size_t i = 0; i < input.size(); ++i) input[i] = std::byte{byte_of(rank, t, static_cast<int64_t>(i))};
  }
  return job;
}

void each_sparse_world(const std::function<void(World&)>& body) {
  for (const int n : {2, 3, 4, 5, 6, 7, 8, 9, 11, 16}) {
    for (const int connections : {1, 2}) {
      const Hosts apart = hosts_of_mesh(n, {});
      World world(n, connections == 1 ? Wire::pair : Wire::tcp, connections, {}, &apart);
      CHECK(!world[0].is_full());
      body(world);
    }
  }
}

void test_allgather() {
  each_sparse_world([](World& world) {
    const int n = world.size();
    // Rows of rank r: of two operations, the first with two tensors. The last has rows on one rank only, or no width.
    const auto rows_of = [n](int64_t base, int rank, size_t t) {
      return t == 0 ? base + rank : t == 1 ? base * (rank % 3) : rank == n - 1 ? base : 0;
    };
    const auto width_of = [](int64_t base, size_t t) { return t == 0 ? 3 : t == 1 ? 1 : base == 40 ? 0 : 2; };
    for (const int64_t base : {0, 1, 40, 500, 70'001}) {
      in_ranks(n, [&](int rank) {
        const auto shape = [&](size_t t) { return std::vector<int64_t>{rows_of(base, rank, t), width_of(base, t)}; };
        Job job = bytes_of(rank, OpType::allgather, {{shape(0), shape(1)}, {shape(2)}});
        CHECK_OK(run(sparse::allgather, world[rank], job.batch));
        for (size_t t = 0; t < 3; ++t) {
          const OutputBuffer& output = t < 2 ? job.operations[0].outputs[t] : job.operations[1].outputs[0];
          int64_t at = 0, rows = 0;
          for (int r = 0; r < n; ++r) {
            rows += rows_of(base, r, t);
            for (int64_t i = 0; i < rows_of(base, r, t) * width_of(base, t); ++i, ++at) {
              CHECK(output.data.get()[at] == std::byte{byte_of(r, t, i)}, "%d of %d, tensor %zu", rank, n, t);
            }
          }
          CHECK(output.bytes == static_cast<size_t>(at));
          CHECK(output.shape == (std::vector<int64_t>{rows, width_of(base, t)}));
        }
      });
    }
  });
}

// What rank `from` sends to rank `to` of tensor t.
using Part = std::function<int64_t(int from, int to, size_t t)>;

void check_alltoall(World& world, const Part& part, int64_t width, int64_t dropped) {
  const int n = world.size();
  const auto begin = [&](int from, int to, size_t t) {
    int64_t rows = 0;
    for (int p = 0; p < to; ++p) rows += part(from, p, t);
    return rows * width;
  };
  in_ranks(n, [&](int rank) {
    const auto shape = [&](size_t t) {
      return std::vector<int64_t>{begin(rank, n, t) / std::max<int64_t>(width, 1) + dropped, width};
    };
    Job job = bytes_of(rank, OpType::alltoall, {{shape(0)}, {shape(1)}});
    for (size_t t = 0; t < 2; ++t) {
      for (int p = 0; p < n; ++p) job.operations[t].splits.push_back(static_cast<int32_t>(part(rank, p, t)));
    }
    CHECK_OK(run(sparse::alltoall, world[rank], job.batch));
    for (size_t t = 0; t < 2; ++t) {
      const OutputBuffer& output = job.operations[t].outputs[0];
      int64_t at = 0, rows = 0;
      for (int r = 0; r < n; ++r) {
        rows += part(r, rank, t);
        CHECK(job.operations[t].received_splits[r] == part(r, rank, t));
        for (int64_t i = 0; i < part(r, rank, t) * width; ++i, ++at) {
          CHECK(output.data.get()[at] == std::byte{byte_of(r, t, begin(r, rank, t) + i)}, "%d of %d", rank, n);
        }
      }
      CHECK(output.shape == (std::vector<int64_t>{rows, width}) && output.bytes == static_cast<size_t>(at));
    }
  });
}

void test_alltoall() {
  each_sparse_world([](World& world) {
    const int n = world.size();
    for (const int64_t base : {0, 1, 300, n < 10 ? 12'001 : 3'001}) {  // TSan makes this slow
      check_alltoall(world, [&](int from, int to, size_t t) { return base + (from + 2 * to) % 3 + (t ? 5 : 0); }, 3, 2);
    }
    // Some parcels are empty, some fit into announcements and some do not.
    const auto mixed = [](int from, int to, size_t t) { return (from * 7 + to * 5 + static_cast<int>(t)) % 4 * 333; };
    check_alltoall(world, mixed, 2, 0);
    // All to one, and one to all.
    check_alltoall(world, [&](int, int to, size_t) { return to == n - 1 ? 20'000 : 0; }, 2, 1);
    check_alltoall(world, [&](int from, int, size_t) { return from == 1 ? 20'000 : 0; }, 2, 0);
    in_ranks(n, [&](int rank) {  // equal parts, one tensor without width
      Job job = bytes_of(rank, OpType::alltoall, {{{2 * n, 0}}, {{3 * n, 1000}}});
      CHECK_OK(run(sparse::alltoall, world[rank], job.batch));
      CHECK(job.operations[0].outputs[0].shape == (std::vector<int64_t>{2 * n, 0}));
      CHECK(job.operations[0].received_splits == std::vector<int32_t>(n, 2));
      const std::byte* output = job.operations[1].outputs[0].data.get();
      for (int64_t i = 0; i < int64_t{3} * n * 1000; ++i) {
        CHECK(output[i] == std::byte{byte_of(static_cast<int>(i / 3000), 1, int64_t{3000} * rank + i % 3000)});
      }
    });
  });
  const Hosts apart = hosts_of_mesh(6, {});
  World many(6, Wire::pair, 1, {}, &apart);  // wrong splits are refused before anything is sent
  Job job = bytes_of(0, OpType::alltoall, {{{3}}});
  CHECK(run(sparse::alltoall, many[0], job.batch).code() == Code::invalid_argument);
  job.operations[0].splits = {2, 2, 0, 0, 0, 0};
  CHECK(run(sparse::alltoall, many[0], job.batch).code() == Code::invalid_argument);
}

void test_broadcast() {
  each_sparse_world([](World& world) {
    const int n = world.size();
    const std::vector<Shapes> all = {{{{}}},
                                     {{{0}}},
                                     {{{7}}, {{0, 3}}, {{200, 5}}},
                                     {{{300'007}}, {{5}}},     // a tree passes chunks on
                                     {{{1'500'001}}, {{9}}}};  // a chain
    for (const Shapes& shapes : all) {
      for (int root = 0; root < n; ++root) {
        if (shapes[0][0] == std::vector<int64_t>{1'500'001} && root != 1) continue;  // enough work as it is
        in_ranks(n, [&](int rank) {
          Job job = bytes_of(rank, OpType::broadcast, shapes, true);
          for (Operation& operation : job.operations) operation.spec.root = root;
          CHECK_OK(run(sparse::broadcast, world[rank], job.batch));
          for (size_t t = 0; t < job.tensors.size(); ++t) {
            const std::vector<std::byte>& output = job.tensors[t].output;
            for (size_t i = 0; i < output.size(); ++i) {
              CHECK(output[i] == std::byte{byte_of(root, t, static_cast<int64_t>(i))}, "%d of %d", rank, n);
            }
          }
        });
      }
    }
  });
}

// Members that do not agree, or lie: everybody ends with a sentence, and nobody makes room for what can't come.
void end_together(int n, const std::string& fact, const std::function<Status(Mesh&, int)>& body) {
  const Hosts apart = hosts_of_mesh(n, {});
  World world(n, Wire::pair, 1, {}, &apart);
  std::vector<Status> results(n);
  in_ranks(n, [&](int rank) {
    results[rank] = body(world[rank], rank);
    if (!results[rank].ok()) world[rank].announce_end(ControlKind::abort, results[rank].message());
  });
  for (const Status& result : results) {
    CHECK(result.code() == Code::aborted && ends_with(result, error_code::unexpected_data, fact));
  }
}

void test_shapes_that_do_not_agree() {
  for (const int n : {2, 6, 9}) {
    for (const int64_t rows : {1, 5000}) {
      end_together(n, "", [&](Mesh& mesh, int rank) {
        Job job = bytes_of(rank, OpType::allgather, {{{rows, rank == 1 ? 3 : 2}}});
        return run(sparse::allgather, mesh, job.batch);
      });
      end_together(n, "", [&](Mesh& mesh, int rank) {
        Job job = bytes_of(rank, OpType::alltoall, {{{rows * n, rank == 1 ? 3 : 2}}});
        return run(sparse::alltoall, mesh, job.batch);
      });
    }
    end_together(n, "", [&](Mesh& mesh, int rank) {  // another number of tensors
      Job job = bytes_of(rank, OpType::allgather, rank == 1 ? Shapes{{{2}, {2}}} : Shapes{{{2}}});
      return run(sparse::allgather, mesh, job.batch);
    });
  }
}

void test_announcements_that_lie() {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  struct Lie {
    int64_t bytes, rows;
  };
  for (const Lie lie : {Lie{-1, -1}, Lie{int64_t{1} << 62, int64_t{1} << 61}, Lie{kMost - 1, kMost / 2}, Lie{0, 1},
                        Lie{-2, -1}, Lie{int64_t{1} << 40, 3}, Lie{0, int64_t{1} << 63}}) {
    for (const Collective collective : {sparse::allgather, sparse::alltoall}) {
      end_together(2, "Rank 1 of the mesh", [&](Mesh& mesh, int rank) -> Status {
        const OpType type = collective == sparse::allgather ? OpType::allgather : OpType::alltoall;
        Job job = bytes_of(rank, type, {{{4, 2}}});
        if (rank == 0) return run(collective, mesh, job.batch);
        const sparse::AnnouncementFormat format(2, job.batch);
        std::vector<int64_t> words(format.words());
        words[0] = lie.bytes;
        words[1] = lie.rows;
        const Transfer send{0, {{words.data(), format.bytes()}}};
        HVD_TRY(mesh.exchange({&send, 1}, {}));
        HVD_TRY(receive_from(mesh, 0, format.bytes()));
        return receive_from(mesh, 0, 1);  // until the other gives up
      });
    }
  }
}

const NamedTest kTests[] = {
    {"allgather", test_allgather},
    {"alltoall", test_alltoall},
    {"broadcast", test_broadcast},
    {"shapes_that_do_not_agree", test_shapes_that_do_not_agree},
    {"announcements_that_lie", test_announcements_that_lie},
};

}  // namespace

int main(int argc, char** argv) { return run_named(argc, argv, kTests); }
