#include "backends/nccl/reduction.h"

#include <cmath>
#include <cstring>

#include "kernels/kernels.h"

namespace horovod::nccl {
namespace {

Status refused(const std::string& what) { return {Code::invalid_argument, "NCCL " + what}; }

bool nccl_type(DType dtype, DataType& type) {
  switch (dtype) {
    case DType::uint8:
    case DType::boolean:
      type = kUint8;
      return true;
    case DType::int8:
      type = kInt8;
      return true;
    case DType::int32:
      type = kInt32;
      return true;
    case DType::uint32:
      type = kUint32;
      return true;
    case DType::int64:
      type = kInt64;
      return true;
    case DType::uint64:
      type = kUint64;
      return true;
    case DType::float16:
      type = kFloat16;
      return true;
    case DType::bfloat16:
      type = kBfloat16;
      return true;
    case DType::float32:
      type = kFloat32;
      return true;
    case DType::float64:
      type = kFloat64;
      return true;
    case DType::float8_e4m3fn:
      type = kFloat8E4m3;
      return true;
    case DType::float8_e5m2:
      type = kFloat8E5m2;
      return true;
    case DType::int16:
    case DType::uint16:
      return false;
  }
  return false;
}

// False for an operation that NCCL does not compute, which goes through the host's memory.
bool nccl_op(ReduceOp op, int& found) {
  switch (op) {
    case ReduceOp::average:
      found = kAverage;
      return true;
    case ReduceOp::sum:
      found = kSum;
      return true;
    case ReduceOp::min:
      found = kMin;
      return true;
    case ReduceOp::max:
      found = kMax;
      return true;
    case ReduceOp::product:
      found = kProduct;
      return true;
    default:
      return false;
  }
}

// The bits of `value` as one element of the type, rounded as the kernels round.
uint64_t bits_of(DType dtype, double value) {
  uint64_t bits = 0;
  const float single = 1.0f;
  const double twice = 1.0;
  const uint8_t small = dtype == DType::float8_e4m3fn ? 0x38 : 0x3c;
  const uint16_t half = dtype == DType::float16 ? 0x3c00 : 0x3f80;
  const void* one = dtype == DType::float64   ? static_cast<const void*>(&twice)
                    : dtype == DType::float32 ? static_cast<const void*>(&single)
                    : is_float8(dtype)        ? static_cast<const void*>(&small)
                                              : static_cast<const void*>(&half);
  kernels::scale(dtype, &bits, one, 1, value);
  return bits;
}

// The smallest and the largest value that the type holds at full precision.
void limits_of(DType dtype, double& least, double& most) {
  if (is_float8(dtype)) {
    least = dtype == DType::float8_e4m3fn ? 0x1p-6 : 0x1p-14;
    most = dtype == DType::float8_e4m3fn ? 448.0 : 57344.0;
    return;
  }
  least = dtype == DType::float64 ? 0x1p-1022 : dtype == DType::float16 ? 0x1p-14 : 0x1p-126;
  most = dtype == DType::float64 ? 0x1.fffffffffffffp1023 : dtype == DType::float16 ? 65504.0 : 0x1.fep127;
}

Status set_factor(DType dtype, double value, Factor& factor) {
  factor.value = value;
  if (!factor.needed()) return {};
  double least, most;
  limits_of(dtype, least, most);
  int exponent = 0;
  const bool exact = std::fabs(std::frexp(value, &exponent)) == 0.5;
  // Three bits are too few for a factor, unless it is a power of two, which needs none.
  const bool coarse = is_float8(dtype) && !exact;
  if (value != 0.0 && (coarse || !(std::fabs(value) >= least && std::fabs(value) <= most))) {
    return refused("multiplies in the tensor's type, and " + std::string(name_of(dtype)) + " can't hold the factor " +
                   std::to_string(value));
  }
  factor.bits = bits_of(dtype, value);
  return {};
}

}  // namespace

Status plan_reduction(const OpSpec& spec, DType dtype, int size, ReductionPlan& plan) {
  plan = {};
  if (!nccl_type(dtype, plan.type)) {
    return refused("does not reduce " + std::string(name_of(dtype)));
  }
  const ReduceOp op = spec.reduce_op;
  if (is_float8(dtype) && op == ReduceOp::average && spec.prescale == 1.0 && spec.postscale == 1.0 &&
      (size & (size - 1)) != 0) {
    return refused("divides by " + std::to_string(size) + " in the precision of " + name_of(dtype));
  }
  if (!nccl_op(op, plan.op)) return refused(std::string("does not compute ") + name_of(op));
  if (dtype == DType::boolean) {  // booleans are bytes of 0 and 1, to which factors do not apply
    plan.op = op == ReduceOp::sum || op == ReduceOp::max ? kMax : kMin;
    return {};
  }
  const bool sum = op == ReduceOp::sum || op == ReduceOp::average;
  const bool average = op == ReduceOp::average;
  if (average && size > 1 && !is_floating(dtype)) {
    return refused("adds up " + std::string(name_of(dtype)) + " in that type, which the sum may not fit");
  }
  if (spec.prescale == 1.0 && spec.postscale == 1.0) {
    // With an average of one rank, NCCL would multiply by 1, and refuse that for float8.
    if (average && size == 1) plan.op = kSum;
    return {};
  }
  if (!is_floating(dtype)) {
    return refused("can't multiply " + std::string(name_of(dtype)) + " by a fraction");
  }
  // The NCCL of PyTorch 2.11 refuses this as an invalid argument, as seen on an H100.
  if (is_float8(dtype) && (!sum || size == 1)) {
    return refused("does not multiply " + std::string(name_of(dtype)) + " without adding it up");
  }
  if (!sum) {
    HVD_TRY(set_factor(dtype, spec.prescale, plan.before));
    return set_factor(dtype, spec.postscale, plan.after);
  }
  plan.op = kSum;
  return set_factor(dtype, spec.prescale * spec.postscale / (average ? size : 1), plan.premul);
}

}  // namespace horovod::nccl
