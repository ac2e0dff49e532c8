// Chooses the function of a backend (Gloo, NCCL, staging in the host's memory) that does a type of operation. A backend
// need not have all types.
#pragma once

#include <array>
#include <initializer_list>
#include <utility>

#include "collectives/batch.h"

namespace horovod {

// A function for each OpType; null: this backend does not have the type. Of: the type on which the functions work.
template <typename Of>
using Functions = std::array<Status (*)(Of, Batch), kOpTypeCount>;

template <typename Of>
constexpr Functions<Of> functions(std::initializer_list<std::pair<OpType, Status (*)(Of, Batch)>> rows) {
  Functions<Of> made{};
  for (const auto& [type, function] : rows) made[static_cast<size_t>(type)] = function;
  return made;
}

template <typename Of>
constexpr bool has(const Functions<Of>& way, OpType type) {
  return traits_of(type).no_tensors || way[static_cast<size_t>(type)];
}

// Runs a batch of a type that `way` has. A batch without tensors is done: the order log says that every member has
// arrived.
template <typename Of>
Status dispatch(const Functions<Of>& way, std::type_identity_t<Of> of, Batch batch) {
  const OpType type = batch[0]->spec.type;
  if (traits_of(type).no_tensors) return {};
  const auto function = way[static_cast<size_t>(type)];
  if (function) return function(of, batch);
  return {Code::internal, error_code::internal,
          std::string("There is no way for ") + name_of(type) + " here; please report this."};
}

}  // namespace horovod
