// How a reduction combines what the ranks bring: its number and its name. What it computes: kernels/reductions.h.
#pragma once

#include <cstdint>
#include <iterator>

namespace horovod {

// Numbers equal horovod.protos.v1.ReduceOp.
enum class ReduceOp : uint8_t {
  average = 0,
  sum = 1,
  adasum = 2,
  min = 3,
  max = 4,
  product = 5,
};

inline constexpr const char* kReduceOpNames[] = {
    "Average",  //
    "Sum",      //
    "Adasum",   //
    "Min",      //
    "Max",      //
    "Product",  //
};
inline constexpr int kReduceOpCount = static_cast<int>(std::size(kReduceOpNames));

constexpr const char* name_of(ReduceOp op) {
  return static_cast<int>(op) < kReduceOpCount ? kReduceOpNames[static_cast<int>(op)] : "?";
}

}  // namespace horovod
