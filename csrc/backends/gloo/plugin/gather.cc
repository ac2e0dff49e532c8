#include <cstring>
#include <numeric>

#include <gloo/allgather.h>
#include <gloo/allgatherv.h>
#include <gloo/alltoall.h>
#include <gloo/alltoallv.h>

#include "backends/gloo/plugin/collectives.h"
#include "collectives/rows.h"

namespace horovod::gloo_plugin {
namespace {

std::string label(size_t member) { return "Rank " + std::to_string(member) + " of the mesh"; }

uint8_t* bytes_of(const std::byte* memory) { return reinterpret_cast<uint8_t*>(const_cast<std::byte*>(memory)); }

}  // namespace

Status allgather(Run run, Batch batch) {
  const auto n = static_cast<size_t>(run.size());
  std::vector<int64_t> rows;
  for (Operation* operation : batch) {
    for (const TensorSpec& tensor : operation->spec.tensors) rows.push_back(tensor.rows());
  }
  const size_t items = rows.size();
  if (items == 0) return {};
  std::vector<int64_t> all_rows(items * n);  // [member][item]
  {
    auto options = run.options<::gloo::AllgatherOptions>();
    options.setInput(rows.data(), items);
    options.setOutput(all_rows.data(), all_rows.size());
    ::gloo::allgather(options);
  }
  size_t item = 0;
  for (Operation* operation : batch) {
    operation->outputs.resize(operation->spec.tensors.size());
    for (size_t t = 0; t < operation->spec.tensors.size(); ++t, ++item) {
      const int64_t each = operation->spec.tensors[t].row_bytes();
      int64_t total = 0;
      std::vector<size_t> parts(n);
      for (size_t member = 0; member < n; ++member) {
        const int64_t count = all_rows[member * items + item];
        HVD_TRY(add_rows(*operation, label(member), count, total));
        parts[member] = static_cast<size_t>(count) * static_cast<size_t>(each);
      }
      HVD_TRY(make_rows(*operation, t, total));
      if (total * each == 0) continue;
      auto options = run.options<::gloo::AllgathervOptions>();
      options.setInput(bytes_of(operation->spans[t].input), parts[run.rank()]);
      options.setOutput(bytes_of(operation->outputs[t].data.get()), parts);
      ::gloo::allgatherv(options);
    }
  }
  return {};
}

// The engine has checked the splits (Engine::route), and it runs alltoalls one by one.
Status alltoall(Run run, Batch batch) {
  const auto n = static_cast<size_t>(run.size());
  for (Operation* operation : batch) {
    const OpSpec& spec = operation->spec;
    const size_t items = spec.tensors.size();
    std::vector<int64_t> rows_out(n * items), rows_in(n * items);  // [member][tensor]
    for (size_t member = 0; member < n; ++member) {
      for (size_t t = 0; t < items; ++t) {
        rows_out[member * items + t] = rows_to(*operation, t, static_cast<int>(member), run.size());
      }
    }
    {
      auto options = run.options<::gloo::AlltoallOptions>();
      options.setInput(rows_out.data(), rows_out.size());
      options.setOutput(rows_in.data(), rows_in.size());
      ::gloo::alltoall(options);
    }
    operation->outputs.resize(items);
    for (size_t t = 0; t < items; ++t) {
      const int64_t each = spec.tensors[t].row_bytes();
      std::vector<int64_t> sent(n), received(n);
      int64_t total = 0;
      for (size_t member = 0; member < n; ++member) {
        const int64_t rows = rows_in[member * items + t];
        HVD_TRY(add_split(*operation, t, static_cast<int>(member), run.size(), label(member), rows, total));
        sent[member] = rows_out[member * items + t] * each;
        received[member] = rows * each;
      }
      HVD_TRY(make_rows(*operation, t, total));
      if (each == 0) continue;
      auto options = run.options<::gloo::AlltoallvOptions>();
      options.setInput(bytes_of(operation->spans[t].input), std::move(sent));
      options.setOutput(bytes_of(operation->outputs[t].data.get()), std::move(received));
      ::gloo::alltoallv(options);
    }
  }
  return {};
}

}  // namespace horovod::gloo_plugin
