// One connection of a mesh: turns stripes and control frames into a byte stream and back. Never blocks.
//
// Threads: send_control() and end_output() from any thread; everything else belongs to the driver. What both touch (the
// socket's sending side and the queue of control frames) is guarded by one mutex, held for one non-blocking system call
// at most.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <sys/uio.h>

#include "base/status.h"
#include "transport/mesh.h"
#include "transport/mesh_frame.h"
#include "transport/mesh_socket.h"
#include "transport/sealed_stream.h"

namespace horovod::wire {

// The part of a transfer that one connection moves.
struct Stripe {
  std::vector<iovec> pieces;
  uint64_t left = 0;    // bytes
  uint64_t number = 0;  // the number of the transfer among those between these two ranks in this direction
  Flight* flight = nullptr;
  size_t piece = 0;   // the next byte is in pieces[piece]
  size_t inside = 0;  // how far the next byte is from the start of that piece

  // The next pieces, at most `room` of them and `limit` bytes; returns how many and adds up `bytes`.
  size_t peek(iovec* out, size_t room, uint64_t limit, uint64_t& bytes) const;
  void advance(uint64_t bytes);
  void fill(const std::byte* from, size_t bytes);  // copies and advances
};

// What a call of read() or write() did.
struct Progress {
  bool moved = false;  // at least one byte
  bool ended = false;  // the stream is over: `error` tells how (0 is an orderly end)
  int error = 0;
  Status status;  // not ok: the peer broke the protocol
};

// What look_ahead() found behind data that no transfer of this member expects yet.
struct Ahead {
  std::optional<ControlFrame> end;  // the peer's abort or leave frame
  bool ended = false;               // the stream is over, `error` as in Progress
  int error = 0;
  Status status;  // as in Progress
};

class Connection {
 public:
  struct Identity {
    uint64_t epoch = 0;
    uint16_t rank = 0;
    uint16_t peer = 0;
    bool carries_control = false;
    std::string label;  // names the peer in messages
    std::string own_label;
  };

  // sealed: the stream that seals and opens the bytes; null where they travel as they are.
  Connection(Socket socket, Identity identity, std::unique_ptr<SealedStream> sealed = nullptr);

  int fd() const { return socket_.fd(); }
  bool expects() const { return !incoming_.empty(); }
  bool owes() const { return !outgoing_.empty() || !sealed_flights_.empty(); }
  uint64_t expected_bytes() const { return incoming_.empty() ? 0 : incoming_.front().left; }

  // Whether reading can have an effect. It can't at the end of the stream, or in front of data for which no transfer
  // was started yet.
  bool wants_read() const { return !ended_ && !stalled_; }
  bool wants_write() const { return !write_failed() && (owes() || control_waits()); }
  bool ended() const { return ended_; }
  bool write_failed() const { return write_failed_.load(std::memory_order_relaxed); }

  bool stalled() const { return stalled_; }

  // How long the peer's host has not acknowledged what was sent to it. To be asked now and then.
  int64_t silent_ms(int64_t now_ms) { return silence_.owed_ms(answers_of(fd()), now_ms); }

  void queue_send(Stripe&& stripe) { outgoing_.push_back(std::move(stripe)); }
  void queue_receive(Stripe&& stripe) {
    incoming_.push_back(std::move(stripe));
    stalled_ = false;
  }

  Progress write();
  // Appends control frames to `inbox`.
  Progress read(std::deque<ControlFrame>& inbox);

  // While stalled: takes in what the socket has, `most` bytes at most, and looks for the end of the peer's epoch in it.
  // The bytes are kept for read(). Without this a rank that waits for another peer would not learn that this one ended.
  Ahead look_ahead(size_t most);

  // Forgets all stripes; from now on arriving data is thrown away, so that a control frame behind it can be found. The
  // rest of a frame that was begun is copied and still goes out, so that a control frame can come behind it.
  void drop_transfers();

  // Queues the frame and sends what the socket takes. False when bytes are left that the driver must send.
  bool send_control(ControlKind kind, std::span<const uint32_t> ids, std::string_view text);

  // Sends the control frames that wait. An error of the call is ignored, as the driver gets it again when it reads.
  // False when there is more, and the socket takes no more now.
  bool send_waiting();

  // Ends the sending side, so that the peer reads an end of stream, unless bytes still wait to be sent. Any thread.
  void end_output();
  // Gives the socket away, and neither reads nor writes it from here on. An empty one where it can't serve any more: a
  // side has ended it, or bytes still wait to be sent and the peer may need the end of the stream (needs_all). Any
  // thread may still send, which then fails; all others must be done.
  Socket hand_over(bool needs_all);
  // Throws away what has arrived, so that closing the socket does not reset the connection under what was sent.
  void discard_input();

  // False after a system call has said "would block", until poll() says otherwise.
  bool readable = true;
  bool writable = true;

 private:
  bool control_waits() const { return control_waits_.load(std::memory_order_acquire); }
  Progress flush(bool with_data);  // with mutex_ held
  ssize_t put(iovec* pieces, size_t count);
  ssize_t take(iovec* pieces, size_t count);
  bool sealed_waits() const { return sealed_ && sealed_->waits(); }  // with mutex_ held
  Status forged() const;
  void advance_output(uint64_t bytes, uint64_t control_bytes);
  Status parse(std::deque<ControlFrame>& inbox);
  Status check(const FrameHeader& header) const;
  void finish_received_frame();
  size_t buffered() const { return buffer_end_ - buffer_begin_; }

  Socket socket_;
  Silence silence_;
  Identity identity_;
  std::unique_ptr<SealedStream> sealed_;

  // Sending. mutex_ guards control_, frame_started_, next_control_, output_ended_ and the right to call sendmsg or
  // sealed_'s. The rest belongs to the driver, which changes it with mutex_ held.
  std::mutex mutex_;
  std::deque<std::string> control_;  // whole frames, or the rest of a dropped data frame and then whole frames
  size_t control_sent_ = 0;          // bytes of the first one
  uint64_t next_control_ = 0;
  bool frame_started_ = false;              // part of a data frame was sent: no other may go before the rest of it
  std::atomic<bool> control_waits_{false};  // control_ is not empty, or sealed bytes wait
  std::atomic<bool> write_failed_{false};
  bool output_ended_ = false;
  std::deque<Stripe> outgoing_;
  // Stripes whose last bytes were sealed and not sent yet. They are not done before those are sent, so that no thread
  // sleeps while bytes wait.
  std::vector<Flight*> sealed_flights_;
  FrameHeader out_header_;
  size_t out_header_left_ = 0;  // both 0: no data frame is open
  uint64_t out_frame_left_ = 0;

  // Receiving
  std::deque<Stripe> incoming_;
  std::vector<std::byte> buffer_;  // bytes that were received and not yet parsed; look_ahead() makes it larger
  size_t buffer_begin_ = 0;
  size_t buffer_end_ = 0;
  uint64_t in_frame_left_ = 0;  // payload of the data frame being received
  uint64_t expected_control_ = 0;
  bool stalled_ = false;
  bool ended_ = false;
  bool discarding_ = false;
  int error_ahead_ = 0;  // the error that look_ahead() got, as a socket reports an error only once
};

}  // namespace horovod::wire
