// Allgather, alltoall and reducescatter: rows that go from one member to another. What a member has for another, or
// gets from it, is one array over all tensors of the batch; a chunk is the same window of all of these arrays.
#include <algorithm>
#include <cstring>

#include "backends/staging/chunks.h"
#include "collectives/rows.h"

namespace horovod::staging {
namespace {

int64_t longest_of(const std::vector<SpanList>& lists) {
  int64_t longest = 0;
  for (const SpanList& list : lists) longest = std::max(longest, list.elements());
  return longest;
}

}  // namespace

Status allgather(Run& run, Batch batch) {
  const int n = run.size();
  std::vector<int64_t> mine, counts;
  HVD_TRY(for_each_tensor(batch, [&](Operation& operation, size_t t) -> Status {
    mine.push_back(operation.spec.tensors[t].rows());
    return {};
  }));
  HVD_TRY(run.peers.exchange_counts(mine, counts));
  for (Operation* operation : batch) operation->outputs.resize(operation->spec.tensors.size());
  // What each member contributes, as one array over all tensors: where it goes, and of this one, where it comes from.
  std::vector<std::vector<Span>> spans(static_cast<size_t>(n));
  size_t item = 0;
  HVD_TRY(for_each_tensor(batch, [&](Operation& operation, size_t t) -> Status {
    const auto rows_of = [&](int member) { return counts[mine.size() * static_cast<size_t>(member) + item]; };
    int64_t rows = 0;
    for (int member = 0; member < n; ++member) {
      HVD_TRY(add_rows(operation, run.peers.labels[static_cast<size_t>(member)], rows_of(member), rows));
    }
    HVD_TRY(run.allocate(operation, t, rows));
    std::byte* output = operation.outputs[t].data.get();
    for (int member = 0; member < n; ++member) {
      const int64_t bytes = rows_of(member) * operation.spec.tensors[t].row_bytes();
      spans[static_cast<size_t>(member)].push_back(
          {member == run.rank() ? operation.spans[t].input : output, output, bytes});
      output += bytes;
    }
    ++item;
    return {};
  }));
  std::vector<SpanList> lists;
  for (const std::vector<Span>& one : spans) lists.emplace_back(one, DType::uint8);
  // One window for each member, and this member's once more as the input.
  const int64_t window = window_bytes(run, n + 1);
  const int64_t longest = longest_of(lists);
  int64_t begin = 0;
  return run.pipeline.run(
      [&](Chunk& chunk) {
        if (begin >= longest) return false;
        const SpanList& own = lists[static_cast<size_t>(run.rank())];
        const int64_t sent = part_of(own.elements(), begin, window);
        inputs_of(own, begin, begin + sent, 0, chunk.in);
        auto at = static_cast<size_t>(window);
        for (const SpanList& list : lists) {
          const int64_t part = part_of(list.elements(), begin, window);
          outputs_of(list, begin, begin + part, at, chunk.out);
          at += static_cast<size_t>(part);
        }
        const size_t received = at - static_cast<size_t>(window);
        chunk.work = [&run, &like = batch[0]->spec, window, sent, received](std::byte* buffer) {
          Operation operation;
          put_on_host(operation, like, DType::uint8, {sent});
          operation.spans = {{buffer, nullptr, sent}};
          return run_into(run, operation, buffer + window, received);
        };
        begin += window;
        return true;
      },
      run.what);
}

Status alltoall(Run& run, Batch batch) {
  const int n = run.size();
  const auto ranks = static_cast<size_t>(n);
  std::vector<int64_t> mine, counts;
  HVD_TRY(for_each_tensor(batch, [&](Operation& operation, size_t t) -> Status {
    for (int to = 0; to < n; ++to) mine.push_back(rows_to(operation, t, to, n));
    return {};
  }));
  HVD_TRY(run.peers.exchange_counts(mine, counts));
  for (Operation* operation : batch) operation->outputs.resize(operation->spec.tensors.size());
  // What goes to each member and what comes from each, as arrays over all tensors; and the most of any pair.
  std::vector<std::vector<Span>> sent(ranks), received(ranks);
  std::vector<int64_t> of_pair(ranks * ranks);
  size_t item = 0;
  HVD_TRY(for_each_tensor(batch, [&](Operation& operation, size_t t) -> Status {
    const int64_t bytes_of_row = operation.spec.tensors[t].row_bytes();
    const auto rows_of = [&](size_t from, size_t to) { return counts[mine.size() * from + item * ranks + to]; };
    const auto me = static_cast<size_t>(run.rank());
    int64_t rows = 0;
    for (size_t from = 0; from < ranks; ++from) {
      const std::string& sender = run.peers.labels[from];
      for (size_t to = 0; to < ranks; ++to) {
        int64_t others = 0;
        HVD_TRY(add_rows(operation, sender, rows_of(from, to), others));
      }
      HVD_TRY(add_split(operation, t, static_cast<int>(from), n, sender, rows_of(from, me), rows));
    }
    HVD_TRY(run.allocate(operation, t, rows));
    const std::byte* input = operation.spans[t].input;
    std::byte* output = operation.outputs[t].data.get();
    for (size_t peer = 0; peer < ranks; ++peer) {
      const int64_t out = rows_of(me, peer) * bytes_of_row;
      const int64_t in = rows_of(peer, me) * bytes_of_row;
      sent[peer].push_back({input, nullptr, out});
      received[peer].push_back({output, output, in});
      input += out;
      output += in;
      for (size_t to = 0; to < ranks; ++to) of_pair[peer * ranks + to] += rows_of(peer, to) * bytes_of_row;
    }
    ++item;
    return {};
  }));
  std::vector<SpanList> outgoing, incoming;
  for (size_t peer = 0; peer < ranks; ++peer) {
    outgoing.emplace_back(sent[peer], DType::uint8);
    incoming.emplace_back(received[peer], DType::uint8);
  }
  const int64_t window = window_bytes(run, 2 * n);
  const int64_t longest = *std::max_element(of_pair.begin(), of_pair.end());
  int64_t begin = 0;
  return run.pipeline.run(
      [&](Chunk& chunk) {
        if (begin >= longest) return false;
        std::vector<int32_t> splits;
        size_t at = 0;
        for (const SpanList& list : outgoing) {
          const int64_t part = part_of(list.elements(), begin, window);
          inputs_of(list, begin, begin + part, at, chunk.in);
          splits.push_back(static_cast<int32_t>(part));
          at += static_cast<size_t>(part);
        }
        const auto bytes = static_cast<int64_t>(at);
        const size_t half = static_cast<size_t>(window) * ranks;
        at = half;
        for (const SpanList& list : incoming) {
          const int64_t part = part_of(list.elements(), begin, window);
          outputs_of(list, begin, begin + part, at, chunk.out);
          at += static_cast<size_t>(part);
        }
        chunk.work = [&run, &like = batch[0]->spec, half, bytes, splits, to_come = at - half](std::byte* buffer) {
          Operation operation;
          put_on_host(operation, like, DType::uint8, {bytes});
          operation.splits = splits;
          operation.spans = {{buffer, nullptr, bytes}};
          return run_into(run, operation, buffer + half, to_come);
        };
        begin += window;
        return true;
      },
      run.what);
}

Status reducescatter(Run& run, Batch batch) {
  const int n = run.size();
  for (Operation* operation : batch) operation->outputs.resize(operation->spec.tensors.size());
  HVD_TRY(for_each_tensor(batch, [&](Operation& operation, size_t t) {
    return run.allocate(operation, t, split_rows(operation.spec.tensors[t].rows(), n, run.rank()).count);
  }));
  return for_each_dtype(batch, [&](DType dtype) -> Status {
    const auto item = static_cast<int64_t>(size_of(dtype));
    // The elements that each member gets, as one array over all tensors.
    std::vector<std::vector<Span>> spans(static_cast<size_t>(n));
    HVD_TRY(for_each_tensor(batch, [&](Operation& operation, size_t t) -> Status {
      const TensorSpec& tensor = operation.spec.tensors[t];
      if (tensor.dtype != dtype) return {};
      const std::byte* input = operation.spans[t].input;
      for (int member = 0; member < n; ++member) {
        const int64_t count = split_rows(tensor.rows(), n, member).count * tensor.row_elements();
        std::byte* output = member == run.rank() ? operation.outputs[t].data.get() : nullptr;
        spans[static_cast<size_t>(member)].push_back({input, output, count});
        input += count * item;
      }
      return {};
    }));
    std::vector<SpanList> lists;
    for (const std::vector<Span>& one : spans) lists.emplace_back(one, dtype);
    const int64_t window = window_bytes(run, n + 1, item) / item;
    const int64_t longest = longest_of(lists);
    int64_t begin = 0;
    return run.pipeline.run(
        [&](Chunk& chunk) {
          if (begin >= longest) return false;
          // One row for each member; those that have less left than the longest get a row with an end of zeros.
          const int64_t width = part_of(longest, begin, window);
          const auto row = static_cast<size_t>(width * item);
          std::vector<std::pair<size_t, size_t>> gaps;  // offset, bytes
          for (size_t member = 0; member < lists.size(); ++member) {
            const int64_t part = part_of(lists[member].elements(), begin, window);
            inputs_of(lists[member], begin, begin + part, member * row, chunk.in);
            const auto filled = static_cast<size_t>(part * item);
            if (filled < row) gaps.emplace_back(member * row + filled, row - filled);
          }
          const size_t result = lists.size() * row;
          const SpanList& own = lists[static_cast<size_t>(run.rank())];
          outputs_of(own, begin, begin + part_of(own.elements(), begin, window), result, chunk.out);
          chunk.work = [&run, &like = batch[0]->spec, dtype, n, width, gaps, result, row](std::byte* buffer) {
            for (const auto& [offset, bytes] : gaps) std::memset(buffer + offset, 0, bytes);
            Operation operation;
            put_on_host(operation, like, dtype, {n, width});
            operation.spans = {{buffer, nullptr, n * width}};
            return run_into(run, operation, buffer + result, row);
          };
          begin += window;
          return true;
        },
        run.what);
  });
}

}  // namespace horovod::staging
