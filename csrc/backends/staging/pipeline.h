// Moves tensors between a device and the host in chunks, so that three things happen at the same time: chunk k+1 comes
// from the device, the host works on chunk k, chunk k-1 goes back.
//
//     device to host   D0 D1 .. D2 .. D3
//     host                W0 .. W1 .. W2 .. W3
//     host to device            H0 .. H1 .. H2 .. H3
//
// A chunk lives in a buffer of page-locked memory; there are three, used in turn. The host waits for one thing only:
// that the chunk which it is to work on has come (which is after the buffer's last chunk has gone). It looks again and
// again, since CUDA can't wait for an event and a peer together; so a lost peer or the end of the epoch ends the wait,
// and it has a deadline.
//
// Nothing is queued that waits for anything but copies: the tensors must be ready when run() is called. So what is
// queued comes to its end by itself, whatever happens to peers, and drain() may wait for that.
#pragma once

#include <array>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backends/cuda/peers.h"
#include "backends/cuda/pinned.h"

namespace horovod::staging {

struct Piece {
  cuda::Address device = 0;
  size_t offset = 0;  // where the piece lies in the buffer
  size_t bytes = 0;
};

struct Chunk {
  std::vector<Piece> in;                          // pieces that are copied to the host before the work
  std::function<Status(std::byte* buffer)> work;  // runs on the host, in the order of chunks
  std::vector<Piece> out;                         // pieces that are copied to the device after the work
};

// Fills in the next chunk; false when there is none.
using Chunks = std::function<bool(Chunk&)>;

// Driver only.
class Pipeline {
 public:
  // down: the stream from device to host. up: the stream back, in whose order results are written.
  Pipeline(std::shared_ptr<cuda::PinnedPool> pool, const cuda::Peers& peers, std::shared_ptr<cuda::Stream> down,
           std::shared_ptr<cuda::Stream> up)
      : pool_(std::move(pool)), peers_(peers), down_(std::move(down)), up_(std::move(up)) {}
  ~Pipeline();
  Pipeline(const Pipeline&) = delete;
  Pipeline& operator=(const Pipeline&) = delete;

  size_t buffer_bytes() const { return pool_->buffer_bytes(); }
  const std::shared_ptr<cuda::Stream>& up() const { return up_; }

  // Blocks until `event` has passed on the device; `what` ends a sentence on what it is for.
  Status await(DeviceEvent& event, const std::string& what) const;
  // Blocks until the last chunk was worked on; copies of the last chunks back to the device may still be under way on
  // up().
  Status run(const Chunks& chunks, const std::string& what);

  // Blocks until everything that is queued has run; false if the device makes no progress for long.
  bool drain();
  // To be called when everything on up() has passed: gives the buffers back.
  void rest();

 private:
  static constexpr size_t kBuffers = 3;
  static constexpr size_t kAhead = 2;  // chunks that are on their way or worked on; the third buffer is on its way back

  struct Buffer {
    std::byte* memory = nullptr;          // null: not taken from the pool
    std::shared_ptr<DeviceEvent> coming;  // passes when the chunk's input has arrived
    std::shared_ptr<DeviceEvent> gone;    // passes when the chunk's output has left; null: nothing ever left
  };

  Status fetch(const Chunk& chunk, Buffer& buffer);
  Status send(const Chunk& chunk, Buffer& buffer);

  const std::shared_ptr<cuda::PinnedPool> pool_;
  const cuda::Peers& peers_;
  const std::shared_ptr<cuda::Stream> down_, up_;
  std::array<Buffer, kBuffers> buffers_;
  size_t next_buffer_ = 0;
  bool used_ = false;  // something was queued since the last rest()
};

}  // namespace horovod::staging
