#include "backends/nccl/packing.h"

#include <algorithm>
#include <bit>

namespace horovod::nccl {
namespace {

constexpr size_t kLeastBuffer = 64u << 10;

constexpr size_t aligned(size_t bytes) {
  return (bytes + PackLayout::kAlignment - 1) / PackLayout::kAlignment * PackLayout::kAlignment;
}

}  // namespace

PackLayout PackLayout::of(const std::vector<TensorSize>& tensors, const PackRule& rule) {
  PackLayout layout;
  layout.offsets.assign(tensors.size(), kStays);
  std::vector<bool> seen(kDTypeCount);
  std::vector<size_t> chosen;
  for (const TensorSize& first : tensors) {
    const auto kind = static_cast<size_t>(first.dtype);
    if (seen[kind]) continue;
    seen[kind] = true;
    chosen.clear();
    size_t end = layout.bytes;
    for (size_t i = 0; i < tensors.size(); ++i) {
      const size_t bytes = tensors[i].bytes;
      if (tensors[i].dtype != first.dtype || bytes == 0 || bytes > rule.threshold_bytes) continue;
      if (end + aligned(bytes) > rule.most_bytes) continue;
      chosen.push_back(i);
      end += aligned(bytes);
    }
    if (chosen.empty() || chosen.size() < rule.least_count) continue;
    layout.parts.push_back({first.dtype, layout.bytes, end - layout.bytes});
    for (const size_t i : chosen) {
      layout.offsets[i] = static_cast<int64_t>(layout.bytes);
      layout.bytes += aligned(tensors[i].bytes);
    }
  }
  return layout;
}

Status PackBuffer::reserve(size_t bytes, size_t most_bytes, const std::shared_ptr<cuda::Stream>& stream) {
  if (memory_.data && bytes <= memory_.bytes) return {};
  const size_t wanted = std::max(bytes, std::min(most_bytes, std::max(kLeastBuffer, std::bit_ceil(bytes))));
  memory_ = {};  // the old buffer goes first, so that the new one may take its place
  cuda::Device& device = stream->device();
  if (const Status status = device.allocate(wanted, stream, memory_); !status.ok()) {
    return {status.code(),
            "There is no buffer in which small tensors are packed (HOROVOD_GPU_PACK_THRESHOLD=0 does "
            "without one): " +
                status.message()};
  }
  // The gaps between tensors are reduced as well, so they hold numbers.
  const cuda::Device::Current current(device);
  HVD_TRY(current.status());
  return device.driver().call(device.driver().fill, reinterpret_cast<cuda::Address>(data()),
                              static_cast<unsigned char>(0), wanted, stream->handle());
}

Status PackedBatch::plan(Batch batch, bool as_bytes, bool alone, const std::shared_ptr<cuda::Stream>& stream,
                         Packing& packing) {
  packing_ = &packing;
  stream_ = stream.get();
  std::vector<TensorSize> sizes;
  std::vector<const Span*> spans;
  for (const Operation* operation : batch) {
    for (size_t t = 0; t < operation->spec.tensors.size(); ++t) {
      const DType dtype = operation->spec.tensors[t].dtype;
      const Span& span = operation->spans[t];
      const size_t bytes = static_cast<size_t>(span.count) * size_of(dtype);
      sizes.push_back({as_bytes ? DType::uint8 : dtype, bytes});
      spans.push_back(&span);
    }
  }
  PackRule rule = packing.rule;
  if (alone) rule.threshold_bytes = 0;
  const PackLayout layout = PackLayout::of(sizes, rule);
  if (layout.bytes > 0) HVD_TRY(packing.buffer.reserve(layout.bytes, rule.most_bytes, stream));
  std::byte* const buffer = packing.buffer.data();
  for (const PackLayout::Part& part : layout.parts) {
    pieces_.push_back({buffer + part.offset, buffer + part.offset, part.bytes, part.dtype});
  }
  for (size_t i = 0; i < spans.size(); ++i) {
    if (layout.offsets[i] != PackLayout::kStays) {
      places_.push_back({spans[i], sizes[i].bytes, buffer + layout.offsets[i]});
    } else if (sizes[i].bytes > 0) {
      pieces_.push_back({spans[i]->input, spans[i]->output, sizes[i].bytes, sizes[i].dtype});
    }
  }
  return {};
}

Status PackedBatch::pack() {
  if (places_.empty()) return {};
  std::vector<cuda::Copy> copies;
  for (const Place& place : places_) copies.push_back({place.span->input, place.in_buffer, place.bytes});
  packing_->used = true;
  return packing_->copier.copy(copies, *stream_);
}

Status PackedBatch::unpack(bool keep_in_place) {
  std::vector<cuda::Copy> copies;
  for (const Place& place : places_) {
    if (keep_in_place && place.span->output == place.span->input) continue;
    copies.push_back({place.in_buffer, place.span->output, place.bytes});
  }
  if (copies.empty()) return {};
  packing_->used = true;
  return packing_->copier.copy(copies, *stream_);
}

}  // namespace horovod::nccl
