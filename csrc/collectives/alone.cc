#include "collectives/alone.h"

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

namespace horovod {
namespace {

// Counts characters of UTF-8: all bytes except those that continue a character.
size_t characters(const std::string& text) {
  return static_cast<size_t>(std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xc0) != 0x80; }));
}

std::string lower(std::string text) {
  for (char& letter : text) letter = static_cast<char>(letter >= 'A' && letter <= 'Z' ? letter - 'A' + 'a' : letter);
  return text;
}

// The sentence why the operation is wrong whatever other ranks say; empty if it is not.
std::string defect(const OpSpec& spec) {
  if (const size_t length = characters(spec.name); length == 0 || length > kMostNameCharacters) {
    return "An operation needs a name of 1 to " + std::to_string(kMostNameCharacters) +
           " characters, but this one has " + std::to_string(length) + ".";
  }
  if (spec.tensors.size() > kMostTensors) {
    return spec.name + " has more than " + std::to_string(kMostTensors) + " tensors.";
  }
  for (const TensorSpec& tensor : spec.tensors) {
    if (tensor.shape.size() > kMostDimensions) {
      return spec.name + " has a tensor with more than " + std::to_string(kMostDimensions) + " dimensions.";
    }
    if (std::any_of(tensor.shape.begin(), tensor.shape.end(), [](int64_t dimension) { return dimension < 0; })) {
      return spec.name + " has a tensor with a negative dimension.";
    }
  }
  if (traits_of(spec.type).no_tensors && !spec.tensors.empty()) {
    return spec.name + " is a " + lower(name_of(spec.type)) + ", which has no tensors, but it came with " +
           std::to_string(spec.tensors.size()) + ".";
  }
  return "";
}

// The sentence why the only member can't run it; empty if it can.
std::string disagreement(const OpSpec& spec, int rank) {
  const bool by_rows = traits_of(spec.type).needs_rows;
  const auto is_scalar = [](const TensorSpec& tensor) { return tensor.shape.empty(); };
  if (by_rows && std::any_of(spec.tensors.begin(), spec.tensors.end(), is_scalar)) {
    return "Rank " + std::to_string(rank) + " tried to " + name_of(spec.type) + " a rank-zero tensor, in " + spec.name +
           ". The tensor needs at least one dimension; use for example tensor.reshape(1).";
  }
  return "";
}

}  // namespace

Status check_alone(const OpSpec& spec, int rank) {
  if (const std::string sentence = defect(spec); !sentence.empty()) {
    return {Code::precondition, error_code::invalid_operation, sentence};
  }
  if (const std::string sentence = disagreement(spec, rank); !sentence.empty()) {
    return {Code::precondition, error_code::no_rows, sentence};
  }
  return {};
}

}  // namespace horovod
