// The implementation of mesh.h over stream sockets. mesh.cc makes and ends it; socket_mesh_moves.cc is what the driver
// does: which connection may move bytes, and when to sleep.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include <poll.h>

#include "base/wait.h"
#include "transport/mesh.h"
#include "transport/mesh_connection.h"

namespace horovod {

struct SocketPeer {
  std::string label;
  std::vector<std::unique_ptr<wire::Connection>> connections;  // none where the peer is this rank itself or no partner
  uint64_t sent = 0;                                           // transfers started
  uint64_t received = 0;
  std::atomic<bool> left{false};     // a leave frame came; written by the driver, read by announce_end()
  std::atomic<bool> aborted{false};  // an abort frame came
  std::string sentence;              // what it said
  int64_t broken_at_us = 0;          // when a connection ended without a leave or abort frame; 0: none did
  int error = 0;                     // the errno of that end
  bool stalled = false;              // whether connection 0 was stalled when look_ahead() last looked
};

class SocketMesh final : public Mesh {
 public:
  SocketMesh(int rank, uint64_t epoch, const Config& config, AbortSignal& abort)
      : rank_(rank), epoch_(epoch), config_(config), abort_(abort) {}
  ~SocketMesh() override;

  Status open(std::vector<MeshPeer> peers, std::vector<std::vector<wire::Socket>> sockets);

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(peers_.size()); }
  bool is_full() const override { return config_.is_full_mesh(size()); }
  Status exchange(std::span<const Transfer> sends, std::span<const Transfer> receives) override;
  Status start(std::span<const Transfer> sends, std::span<const Transfer> receives, Flight& flight) override;
  Status finish(Flight& flight) override;
  Status progress(bool& busy) override;
  void while_waiting(std::function<Status()> act) override { while_waiting_ = std::move(act); }
  Status send_control(int peer, ControlKind kind, std::span<const uint32_t> ids, std::string_view text) override;
  Status next_control(ControlFrame& frame, bool& found) override;
  Status wait(int64_t timeout_us) override;
  void wake() override;
  void set_patient(bool patient) override { patient_ = patient; }
  void listen_to(const std::vector<int>& peers) override;
  void set_poll_source(PollSource* source) override { poll_source_ = source; }
  void announce_end(ControlKind kind, std::string_view sentence) override;
  void linger(int64_t limit_us) override;
  std::vector<KeptSocket> hand_over(bool keep) override;

 private:
  struct Line {  // a connection, and the peer to which it leads
    SocketPeer* peer;
    wire::Connection* connection;
  };

  // Only the first connection to a peer carries control frames, so one that is alone has had the last word of both
  // sides when it has theirs.
  bool stays_open(const SocketPeer& peer) const { return config_.keeps_connections && peer.connections.size() == 1; }
  Status alive() const;
  Status fail(Status status);
  Status lose(SocketPeer& peer);
  static Status departed(const SocketPeer& peer);
  static Status no_partner(const SocketPeer& peer);
  Status timed_out() const;

  Status pass(bool& moved);
  Status read(Line& line, bool& moved);
  Status judge();
  Status look_ahead(int64_t now);
  Status look_for_silence(int64_t now);
  Status unreachable(const SocketPeer& peer);
  Status rest(bool may_poll, Wait& wait, int64_t limit_us, PollSource* source);
  WaitPolicy polling() const { return {.yield_us = patient_ ? config_.yield_us : config_.spin_us}; }
  // To read from more connections than this, of which most have nothing, costs more than to ask poll() about all.
  static constexpr size_t kMostLikely = 4;
  void look();
  void poll_lines(int timeout_ms, PollSource* source = nullptr);
  void nudge();
  void note_control(size_t from);

  const int rank_;
  const uint64_t epoch_;
  const Config config_;
  AbortSignal& abort_;
  std::function<Status()> while_waiting_;
  std::deque<SocketPeer> peers_;           // not a vector: a SocketPeer does not move
  std::vector<Line> lines_;                // all connections
  std::vector<pollfd> polled_;             // one for each line, then the wake-up descriptor
  std::vector<wire::Connection*> likely_;  // where look() reads without asking poll(); empty: nowhere
  uint32_t looks_ = 0;
  PollSource* poll_source_ = nullptr;
  wire::Socket wake_fd_;
  std::deque<ControlFrame> inbox_;
  bool just_read_ = false;  // next_control() has given out a frame and not said "none" since
  Status failed_;           // the first failure; final
  bool unwell_ = false;     // some peer has left or has a broken connection: the driver calls judge() before it sleeps
  bool patient_ = false;
  int64_t looked_ahead_us_ = 0;
  int64_t looked_for_silence_us_ = 0;
  int64_t lively_us_ = 0;            // about when a byte last moved
  std::atomic<bool> talked_{false};  // a byte has moved since lively_us_ was set
  std::atomic<bool> woken_{false};   // wake() was called; the next wait() takes it

  // A thread that wants the driver to look again sets nudged_, and writes to the descriptor only if it sees sleeping_;
  // the driver sets sleeping_ and then looks at nudged_. All sequentially consistent, so one of the two sees the other.
  std::atomic<bool> nudged_{false};
  std::atomic<bool> sleeping_{false};
};

}  // namespace horovod
