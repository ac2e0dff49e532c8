#include "collectives/op_spec.h"

#include <algorithm>

namespace horovod {

int64_t TensorSpec::elements() const {
  int64_t product = 1;
  for (int64_t dimension : shape) product *= dimension;
  return product;
}

int64_t TensorSpec::row_elements() const {
  int64_t product = 1;
  for (size_t i = 1; i < shape.size(); ++i) product *= shape[i];
  return product;
}

bool OpSpec::agrees_with(const OpSpec& other) const {
  if (type != other.type || reduce_op != other.reduce_op || prescale != other.prescale ||
      postscale != other.postscale || root != other.root || device != other.device ||
      tensors.size() != other.tensors.size()) {
    return false;
  }
  const size_t first_dimension = traits_of(type).uneven_rows ? 1 : 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const TensorSpec& mine = tensors[i];
    const TensorSpec& theirs = other.tensors[i];
    if (mine.dtype != theirs.dtype || mine.shape.size() != theirs.shape.size()) return false;
    for (size_t d = first_dimension; d < mine.shape.size(); ++d) {
      if (mine.shape[d] != theirs.shape[d]) return false;
    }
  }
  return true;
}

size_t OpSpec::bytes() const {
  size_t bytes = 0;
  for (const TensorSpec& tensor : tensors) bytes += tensor.bytes();
  return bytes;
}

bool OpSpec::uniform_dtype() const {
  return std::all_of(tensors.begin(), tensors.end(),
                     [&](const TensorSpec& tensor) { return tensor.dtype == tensors[0].dtype; });
}

}  // namespace horovod
