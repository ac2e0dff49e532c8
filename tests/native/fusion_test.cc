// Which operations run as one batch.
#include "engine/fusion.h"

#include <vector>

#include "check.h"
#include "named_tests.h"

namespace horovod::testing {
namespace {

OpSpec floats(int64_t count) {
  OpSpec spec;
  spec.type = OpType::allreduce;
  spec.name = "allreduce.x";
  spec.tensors = {{DType::float32, {count}}};
  return spec;
}

size_t fused(const std::vector<OpSpec>& specs, size_t most_bytes = 1 << 20) {
  return fused_count(specs.size(), [&](size_t index) { return &specs[index]; }, most_bytes);
}

void the_limit_is_of_all_bytes_together() {
  const std::vector<OpSpec> specs(5, floats(100));
  CHECK(fused(specs) == 5);
  CHECK(fused(specs, 1200) == 3 && fused(specs, 1199) == 2);
  CHECK(fused(specs, 0) == 1);  // one is always run, whatever its size
}

void what_does_not_run_alike_ends_a_batch() {
  void (*const changes[])(OpSpec&) = {
      [](OpSpec& spec) { spec.type = OpType::broadcast; },
      [](OpSpec& spec) { spec.reduce_op = ReduceOp::max; },
      [](OpSpec& spec) { spec.reduce_op = ReduceOp::adasum; },
      [](OpSpec& spec) { spec.device = DeviceKind::gpu; },
      [](OpSpec& spec) { spec.prescale = 2; },
      [](OpSpec& spec) { spec.postscale = 2; },
      [](OpSpec& spec) { spec.root = 1; },
      [](OpSpec& spec) { spec.tensors[0].dtype = DType::float64; },
      [](OpSpec& spec) { spec.tensors.push_back({DType::float64, {1}}); },  // of a grouped call
  };
  for (const auto change : changes) {
    std::vector<OpSpec> specs(4, floats(1));
    change(specs[2]);
    CHECK(fused(specs) == 2);
  }
}

void some_operations_run_alone() {
  for (const OpType type : {OpType::alltoall, OpType::barrier}) {
    std::vector<OpSpec> specs(2, floats(1));
    for (OpSpec& spec : specs) spec.type = type;
    CHECK(fused(specs) == 1);
  }
  std::vector<OpSpec> specs(2, floats(1));
  for (OpSpec& spec : specs) spec.reduce_op = ReduceOp::adasum;
  CHECK(fused(specs) == 1);
  for (OpSpec& spec : specs) spec = floats(1), spec.tensors.push_back({DType::float64, {1}});
  CHECK(fused(specs) == 1);
}

void an_unknown_operation_ends_a_batch() {
  const OpSpec spec = floats(1);
  const auto known_but = [&](size_t unknown) {
    return [&spec, unknown](size_t index) { return index == unknown ? nullptr : &spec; };
  };
  CHECK(fused_count(4, known_but(0), 1 << 20) == 1);
  CHECK(fused_count(4, known_but(3), 1 << 20) == 3);
}

}  // namespace
}  // namespace horovod::testing

int main(int argc, char** argv) {
  using namespace horovod::testing;
  const NamedTest tests[] = {
      {"limit", the_limit_is_of_all_bytes_together},
      {"alike", what_does_not_run_alike_ends_a_batch},
      {"alone", some_operations_run_alone},
      {"unknown", an_unknown_operation_ends_a_batch},
  };
  return run_named(argc, argv, tests);
}
