// Row counts that other members tell are checked and added up, and room is made for so many rows.
#include "collectives/rows.h"

#include <limits>
#include <vector>

#include "check.h"
#include "named_tests.h"

using namespace horovod;
using namespace horovod::testing;

namespace {

void prepare(Operation& operation, std::vector<int64_t> shape) {
  operation.spec.name = "alltoall.x";
  operation.spec.tensors = {{DType::float32, std::move(shape)}};
  operation.outputs.resize(1);
}

void test_counts() {
  Operation operation;
  prepare(operation, {6, 2});
  int64_t total = 1;
  CHECK_OK(add_rows(operation, "rank 1", 0, total));
  CHECK_OK(add_rows(operation, "rank 1", kMostRows, total));
  CHECK(total == kMostRows + 1);
  for (const int64_t rows : {int64_t{-1}, kMostRows + 1}) {
    const Status status = add_rows(operation, "rank 1", rows, total);
    CHECK(status.code() == Code::aborted &&
          ends_with(status, error_code::unexpected_data, "rank 1", std::to_string(rows) + " rows", "alltoall.x"));
  }
}

void test_splits() {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  Operation operation;
  prepare(operation, {6, 2});
  for (const int member : {0, 1, 2}) CHECK(rows_to(operation, 0, member, 3) == 2);
  operation.splits = {1, 5, 0};
  CHECK(rows_to(operation, 0, 1, 3) == 5);
  int64_t total = 0;
  CHECK_OK(add_split(operation, 0, 2, 3, "rank 2", kMost, total));
  CHECK_OK(add_split(operation, 0, 1, 3, "rank 1", 4, total));
  CHECK_OK(add_split(operation, 1, 1, 3, "rank 1", 5, total));  // only the first tensor's are received_splits
  CHECK(total == kMost + 9);
  CHECK((operation.received_splits == std::vector<int32_t>{0, 4, static_cast<int32_t>(kMost)}));
  CHECK(add_split(operation, 0, 0, 3, "rank 0", kMost + 1, total).code() == Code::aborted);
}

void test_splits_of() {
  Operation operation;
  prepare(operation, {6, 2});
  std::vector<int64_t> splits;
  CHECK_OK(splits_of(operation, 0, 3, splits));
  CHECK((splits == std::vector<int64_t>{2, 2, 2}));
  CHECK(ends_with(splits_of(operation, 0, 4, splits), error_code::wrong_splits, "alltoall.x", "6 rows", "4 ranks"));
  operation.splits = {1, 4, 0};  // one row goes nowhere
  CHECK_OK(splits_of(operation, 0, 3, splits));
  CHECK((splits == std::vector<int64_t>{1, 4, 0}));
  for (const std::vector<int32_t>& wrong : {std::vector<int32_t>{1, 5}, {1, 5, 1}, {-1, 5, 1}}) {
    operation.splits = wrong;
    CHECK(splits_of(operation, 0, 3, splits).code() == Code::invalid_argument);
  }
}

void test_announced() {
  using Numbers = std::vector<int64_t>;
  CHECK_OK(check_announced(1, Numbers{}, Numbers{}, 0));
  CHECK_OK(check_announced(1, Numbers{3, 5}, Numbers{4, 0}, 12));
  CHECK_OK(check_announced(1, Numbers{kMostRows}, Numbers{1}, uint64_t(kMostRows)));
  const Numbers most(3, std::numeric_limits<int64_t>::max());
  struct Claim {
    Numbers rows, row_bytes;
    uint64_t bytes;
  };
  for (const Claim& claim : {Claim{{3, 5}, {4, 1}, 12}, Claim{{-1}, {0}, 0}, Claim{{-1}, {4}, uint64_t(-4)},
                             Claim{{kMostRows + 1}, {0}, 0}, Claim{{kMostRows, 1}, {1, 1}, uint64_t(kMostRows) + 1},
                             Claim{most, {2, 2, 2}, uint64_t(-6)}, Claim{{4}, {most[0]}, uint64_t(-4)}}) {
    const Status status = check_announced(1, claim.rows, claim.row_bytes, claim.bytes);
    CHECK(status.code() == Code::aborted);
    CHECK(ends_with(status, error_code::unexpected_data, "Rank 1 of the mesh",
                    " " + std::to_string(claim.bytes) + " bytes"));
  }
}

void test_room() {
  Operation operation;
  prepare(operation, {6, 2});
  CHECK_OK(make_rows(operation, 0, 3));
  CHECK((operation.outputs[0].shape == std::vector<int64_t>{3, 2}) && operation.outputs[0].bytes == 24);
  Operation scalar;
  prepare(scalar, {});
  CHECK_OK(make_rows(scalar, 0, 5));
  CHECK((scalar.outputs[0].shape == std::vector<int64_t>{5}) && scalar.outputs[0].bytes == 20);
  const Status status = make_rows(operation, 0, int64_t{1} << 61);  // more bytes than a number can say
  CHECK(status.code() == Code::internal && ends_with(status, error_code::out_of_memory, "2305843009213693952 rows"));
}

const NamedTest kTests[] = {
    {"counts", test_counts},       {"splits", test_splits}, {"splits_of", test_splits_of},
    {"announced", test_announced}, {"room", test_room},
};

}  // namespace

int main(int argc, char** argv) { return run_named(argc, argv, kTests); }
