// What each reduction computes of two values: one functor for each.
//
// apply(left, right) takes vectors, and single floats for the float8 types. Beside it a functor says on what it works:
//     kOrdered   it chooses one of its two values, so 16-bit floats need no conversion; kSmallestWins: which of them.
//                Others compute integers on unsigned lanes, because those wrap.
//     kFloats    it has a meaning for floating-point numbers
//     OnTruth    what it is of truth values: Max is OR, Min is AND
#pragma once

#include "base/reduce_op.h"
#include "kernels/vector.h"

namespace horovod::kernels {
namespace {

// A NaN on either side wins, as in numpy.minimum: a NaN on the right fails the comparison and is chosen by it, one on
// the left needs a look of its own.
struct Min {
  static constexpr bool kOrdered = true;
  static constexpr bool kSmallestWins = true;
  static constexpr bool kFloats = true;
  using OnTruth = Min;
  template <class V>
  static HVD_INLINE V apply(V left, V right) {
    return left < right ? left : right;
  }
  static HVD_INLINE Floats apply(Floats left, Floats right) {
    return left != left ? left : left < right ? left : right;
  }
  static HVD_INLINE Doubles apply(Doubles left, Doubles right) {
    return left != left ? left : left < right ? left : right;
  }
};

struct Max {
  static constexpr bool kOrdered = true;
  static constexpr bool kSmallestWins = false;
  static constexpr bool kFloats = true;
  using OnTruth = Max;
  template <class V>
  static HVD_INLINE V apply(V left, V right) {
    return left > right ? left : right;
  }
  static HVD_INLINE Floats apply(Floats left, Floats right) {
    return left != left ? left : left > right ? left : right;
  }
  static HVD_INLINE Doubles apply(Doubles left, Doubles right) {
    return left != left ? left : left > right ? left : right;
  }
};

struct Sum {
  static constexpr bool kOrdered = false;
  static constexpr bool kFloats = true;
  using OnTruth = Max;
  template <class V>
  static HVD_INLINE V apply(V left, V right) {
    return left + right;
  }
};

struct Product {
  static constexpr bool kOrdered = false;
  static constexpr bool kFloats = true;
  using OnTruth = Min;
  template <class V>
  static HVD_INLINE V apply(V left, V right) {
    return left * right;
  }
};

template <class Op, class V>
HVD_INLINE V combine(V left, V right) {
  return Op::apply(left, right);
}
template <class Op>
HVD_INLINE FloatPair combine(FloatPair left, FloatPair right) {
  return {Op::apply(left.low, right.low), Op::apply(left.high, right.high)};
}

// Calls visit(op, functor) for each reduction that is done element by element, which Adasum is not.
template <class Visit>
constexpr void for_each_reduction(Visit visit) {
  visit(ReduceOp::average, Sum{});  // the caller's postscale divides
  visit(ReduceOp::sum, Sum{});
  visit(ReduceOp::min, Min{});
  visit(ReduceOp::max, Max{});
  visit(ReduceOp::product, Product{});
}

}  // namespace
}  // namespace horovod::kernels
