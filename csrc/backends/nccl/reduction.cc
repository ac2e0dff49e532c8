#include "backends/nccl/reduction.h"

#include <cmath>
#include <cstring>

#include "kernels/kernels.h"

namespace horovod::nccl {
namespace {

Status refused(const OpSpec& spec, const std::string& what) {
  return {Code::invalid_argument, spec.name + ": NCCL " + what};
}

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
    case DType::int64:
      type = kInt64;
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
    case DType::int16:
    case DType::uint16:
      return false;
  }
  return false;
}

// One of the type, times the value: rounded as the kernels round.
uint64_t bits_of(DType dtype, double value) {
  uint64_t bits = 0;
  const float single = 1.0f;
  const double twice = 1.0;
  const uint16_t half = dtype == DType::float16 ? 0x3c00 : 0x3f80;
  const void* one = dtype == DType::float64   ? static_cast<const void*>(&twice)
                    : dtype == DType::float32 ? static_cast<const void*>(&single)
                                              : static_cast<const void*>(&half);
  kernels::scale(dtype, &bits, one, 1, value);
  return bits;
}

// The smallest value of full precision and the largest one.
void limits_of(DType dtype, double& least, double& most) {
  least = dtype == DType::float64 ? 0x1p-1022 : dtype == DType::float16 ? 0x1p-14 : 0x1p-126;
  most = dtype == DType::float64 ? 0x1.fffffffffffffp1023 : dtype == DType::float16 ? 65504.0 : 0x1.fep127;
}

Status set_factor(const OpSpec& spec, DType dtype, double value, Factor& factor) {
  factor.value = value;
  if (!factor.needed()) return {};
  double least, most;
  limits_of(dtype, least, most);
  if (value != 0.0 && !(std::fabs(value) >= least && std::fabs(value) <= most)) {
    return refused(spec, "multiplies in the tensor's type, and " + std::string(name_of(dtype)) +
                             " can't hold the factor " + std::to_string(value) +
                             ". Scale the tensor before or after the operation instead.");
  }
  factor.bits = bits_of(dtype, value);
  return {};
}

}  // namespace

Status plan_reduction(const OpSpec& spec, DType dtype, int size, ReductionPlan& plan) {
  plan = {};
  if (!nccl_type(dtype, plan.type)) {
    return refused(spec, "does not reduce " + std::string(name_of(dtype)) +
                             ". Convert the tensor to int32, or move it to the CPU.");
  }
  const ReduceOp op = spec.reduce_op;
  if (op == ReduceOp::adasum) {
    return refused(spec,
                   "does not compute Adasum, which is not there yet for GPU tensors. Move the tensor to the CPU.");
  }
  if (dtype == DType::boolean) {  // bytes of 0 and 1; factors mean nothing
    plan.op = op == ReduceOp::sum || op == ReduceOp::max ? kMax : kMin;
    return {};
  }
  const bool sum = op == ReduceOp::sum || op == ReduceOp::average;
  const bool average = op == ReduceOp::average;
  plan.op = average ? kAverage : sum ? kSum : op == ReduceOp::min ? kMin : op == ReduceOp::max ? kMax : kProduct;
  if (spec.prescale == 1.0 && spec.postscale == 1.0) return {};
  if (!is_floating(dtype)) {
    return refused(spec, "can't multiply " + std::string(name_of(dtype)) +
                             " by a fraction. Leave out the factors, or convert the tensor to a floating-point type.");
  }
  if (!sum) {
    HVD_TRY(set_factor(spec, dtype, spec.prescale, plan.before));
    return set_factor(spec, dtype, spec.postscale, plan.after);
  }
  plan.op = kSum;
  return set_factor(spec, dtype, spec.prescale * spec.postscale / (average ? size : 1), plan.premul);
}

}  // namespace horovod::nccl
