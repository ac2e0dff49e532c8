// Small tensors share a buffer on the device, so that NCCL is called once for many: a call costs some microseconds on
// the host and on the device, a copy of a few kilobytes next to nothing.
//
// What is packed follows from what all members know alike: the sizes and dtypes of the batch's tensors, and settings
// that must agree. So all of them call NCCL alike, whatever becomes of the copies on one of them.
#pragma once

#include <memory>
#include <vector>

#include "backends/cuda/copier.h"
#include "collectives/batch.h"

namespace horovod::nccl {

struct PackRule {
  size_t threshold_bytes = 0;  // larger tensors are not packed; 0: none is
  size_t least_count = 1;      // fewer small tensors of one dtype are not worth packing
  size_t most_bytes = 0;       // size of a buffer at most
};

struct TensorSize {
  DType dtype;
  size_t bytes;
};

// Where each tensor of a batch goes.
struct PackLayout {
  // Alignment of a tensor in the buffer: the widest copy, a multiple of every element.
  static constexpr size_t kAlignment = 16;
  static constexpr int64_t kStays = -1;
  struct Part {  // a part of the buffer, for tensors of one dtype
    DType dtype;
    size_t offset;
    size_t bytes;
  };
  std::vector<int64_t> offsets;  // tensor -> its offset in the buffer, or kStays
  std::vector<Part> parts;
  size_t bytes = 0;

  static PackLayout of(const std::vector<TensorSize>& tensors, const PackRule& rule);
};

// What one call of NCCL's reads and writes: a tensor, or part of the buffer.
struct Piece {
  const std::byte* input = nullptr;
  std::byte* output = nullptr;
  size_t bytes = 0;
  DType dtype = DType::uint8;

  size_t count() const { return bytes / size_of(dtype); }
};

// The buffer of one stream. It is used in the order of the stream, by which it is also given back: so the host waits
// for nothing when it grows, nor does anybody read what was overwritten.
class PackBuffer {
 public:
  // Makes room for so many bytes: grows to the next power of two, but beyond most_bytes only as far as needed.
  Status reserve(size_t bytes, size_t most_bytes, const std::shared_ptr<cuda::Stream>& stream);
  std::byte* data() const { return memory_.data.get(); }

 private:
  OutputBuffer memory_;
};

// The buffer in which a batch is packed, if it is packed.
struct Packing {
  const PackRule& rule;
  const cuda::Copier& copier;
  PackBuffer& buffer;
  bool used = false;  // something was queued that reads or writes the buffer
};

// A batch as NCCL sees it. In this order: plan(), pack(), NCCL's calls for all pieces, unpack().
class PackedBatch {
 public:
  // as_bytes: dtypes don't matter. alone: a member that is the only one packs nothing.
  Status plan(Batch batch, bool as_bytes, bool alone, const std::shared_ptr<cuda::Stream>& stream, Packing& packing);
  const std::vector<Piece>& pieces() const { return pieces_; }
  Status pack();
  // keep_in_place: tensors that were reduced in place have not changed, as at the root of a broadcast.
  Status unpack(bool keep_in_place);

 private:
  struct Place {
    const Span* span;
    size_t bytes;
    std::byte* in_buffer;
  };
  std::vector<Piece> pieces_;
  std::vector<Place> places_;  // places of the packed tensors
  Packing* packing_ = nullptr;
  const cuda::Stream* stream_ = nullptr;
};

}  // namespace horovod::nccl
