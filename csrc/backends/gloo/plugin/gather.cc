#include <cstring>
#include <limits>
#include <numeric>

#include <gloo/allgather.h>
#include <gloo/allgatherv.h>
#include <gloo/alltoall.h>
#include <gloo/alltoallv.h>

#include "backends/gloo/plugin/collectives.h"

namespace horovod::gloo_plugin {
namespace {

int64_t row_bytes(const TensorSpec& tensor) {
  return tensor.row_elements() * static_cast<int64_t>(size_of(tensor.dtype));
}

// Memory for `rows` rows like those of tensor `t`.
bool make_output(Operation& operation, size_t t, int64_t rows) {
  OutputBuffer& output = operation.outputs[t];
  output.shape = operation.spec.tensors[t].shape;
  if (output.shape.empty()) output.shape = {0};
  output.shape[0] = rows;
  return output.allocate(static_cast<size_t>(rows * row_bytes(operation.spec.tensors[t])));
}

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
      const int64_t each = row_bytes(operation->spec.tensors[t]);
      int64_t total = 0;
      std::vector<size_t> parts(n);
      for (size_t member = 0; member < n; ++member) {
        const int64_t count = all_rows[member * items + item];
        int64_t bytes = 0;
        if (count < 0 || __builtin_add_overflow(total, count, &total) || __builtin_mul_overflow(total, each, &bytes)) {
          return {Code::aborted, "Rank " + std::to_string(member) + " of the mesh announced " + std::to_string(count) +
                                     " rows for " + operation->spec.name + ", which can't be."};
        }
        parts[member] = static_cast<size_t>(count * each);
      }
      if (!make_output(*operation, t, total)) return no_memory(*operation);
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
        rows_out[member * items + t] =
            operation->splits.empty() ? spec.tensors[t].rows() / static_cast<int64_t>(n) : operation->splits[member];
      }
    }
    {
      auto options = run.options<::gloo::AlltoallOptions>();
      options.setInput(rows_out.data(), rows_out.size());
      options.setOutput(rows_in.data(), rows_in.size());
      ::gloo::alltoall(options);
    }
    operation->outputs.resize(items);
    operation->received_splits.assign(n, 0);
    for (size_t t = 0; t < items; ++t) {
      const int64_t each = row_bytes(spec.tensors[t]);
      std::vector<int64_t> sent(n), received(n);
      int64_t total = 0;
      for (size_t member = 0; member < n; ++member) {
        const int64_t rows = rows_in[member * items + t];
        if (rows < 0 || rows > std::numeric_limits<int32_t>::max()) {
          return {Code::aborted, "Rank " + std::to_string(member) + " of the mesh sends " + std::to_string(rows) +
                                     " rows in " + spec.name + ", which is not what a split can say."};
        }
        if (t == 0) operation->received_splits[member] = static_cast<int32_t>(rows);
        sent[member] = rows_out[member * items + t] * each;
        received[member] = rows * each;
        total += rows;
      }
      if (!make_output(*operation, t, total)) return no_memory(*operation);
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
