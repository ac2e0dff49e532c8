#include "kernels/kernels.h"

#include <atomic>
#include <cstring>
#include <string>

#include "kernels/cpu.h"
#include "kernels/table.h"

namespace horovod::kernels {
namespace {

// Null until first use. Racing first users find the same answer, so nothing more than atomicity is needed.
std::atomic<const Table*> chosen{nullptr};

const Table* find(const char* isa) {
  const CpuFeatures cpu = cpu_features();
  if (cpu.avx512 && kAvx512Table && (!isa || std::strcmp(isa, kAvx512Table->isa) == 0)) return kAvx512Table;
  if (cpu.avx2 && kAvx2Table && (!isa || std::strcmp(isa, kAvx2Table->isa) == 0)) return kAvx2Table;
  if (!isa || std::strcmp(isa, kPortableTable->isa) == 0) return kPortableTable;
  return nullptr;
}

void copy(DType dtype, void* output, const void* input, size_t count) {
  if (output != input && count > 0) std::memcpy(output, input, count * size_of(dtype));
}

}  // namespace

const Table& current_table() {
  const Table* current = chosen.load(std::memory_order_relaxed);
  if (!current) [[unlikely]] {
    current = find(nullptr);
    chosen.store(current, std::memory_order_relaxed);
  }
  return *current;
}

Status check_reduction(DType dtype, ReduceOp op) {
  if (static_cast<int>(dtype) >= kDTypeCount) {
    return {Code::invalid_argument, error_code::invalid_operation,
            "Element type number " + std::to_string(static_cast<int>(dtype)) + " is not known."};
  }
  if (static_cast<int>(op) >= kReduceOpCount) {
    return {Code::invalid_argument, error_code::invalid_operation,
            "Reduction number " + std::to_string(static_cast<int>(op)) + " is not known."};
  }
  if (op == ReduceOp::average && dtype == DType::boolean) {
    return {Code::invalid_argument, error_code::undefined_reduction,
            "Average of bool is not defined. Use Max (any rank true) or Min (all ranks true), or convert the tensor to "
            "a numeric type first."};
  }
  if (op == ReduceOp::adasum && (!is_floating(dtype) || is_float8(dtype))) {
    return {Code::invalid_argument, error_code::undefined_reduction,
            std::string(name_of(op)) + " of " + name_of(dtype) +
                " is not defined. It needs float16, bfloat16, float32 or float64."};
  }
  if (op != ReduceOp::adasum && !current_table().reduce[static_cast<int>(dtype)][static_cast<int>(op)]) {
    return {Code::invalid_argument, error_code::undefined_reduction,
            std::string(name_of(op)) + " of " + name_of(dtype) + " is not defined. It needs integers or bool."};
  }
  return {};
}

void reduce(DType dtype, ReduceOp op, void* output, const void* const* inputs, int input_count, size_t count,
            double postscale) {
  if (input_count == 1) return scale(dtype, output, inputs[0], count, postscale);
  current_table().reduce[static_cast<int>(dtype)][static_cast<int>(op)](output, inputs, input_count, count, postscale);
  if (postscale != 1.0 && !is_floating(dtype)) scale(dtype, output, output, count, postscale);
}

void scale(DType dtype, void* output, const void* input, size_t count, double factor) {
  const ScaleFunction function = current_table().scale[static_cast<int>(dtype)];
  if (factor == 1.0 || !function) return copy(dtype, output, input, count);
  function(output, input, count, factor);
}

const char* isa() { return current_table().isa; }

bool force_isa(const char* name) {
  const Table* const found = find(name);
  if (found) chosen.store(found, std::memory_order_relaxed);
  return found != nullptr;
}

}  // namespace horovod::kernels
