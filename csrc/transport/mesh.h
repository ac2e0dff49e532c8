// Stream sockets to all or some of the peers of a communicator. They carry exchanges of data, which both sides expect,
// and small control frames, which may come at any time.
//
// The sockets are already connected and authenticated (worker/runtime/mesh.py does the handshake), so no byte that is
// read here comes from a stranger. Every connection still checks every header: a peer of another epoch, a wrong length
// or garbage ends the epoch with a sentence that names the peer. Where Config::wire asks for it, every byte is
// authenticated, or encrypted as well (sealed_stream.h).
//
// Threads: everything but send_control(), wake() and announce_end() belongs to the driver.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <sys/uio.h>

#include "base/abort.h"
#include "base/config.h"
#include "base/status.h"
#include "transport/mesh_socket.h"
#include "transport/sealed_stream.h"

namespace horovod {

struct MeshPeer {
  std::string label;     // "rank 1 (pid 4242) on host node-b", for messages
  std::vector<int> fds;  // one or more connections, the same number on both sides; owned by the mesh from now on
  std::vector<wire::Keys> keys;  // of each connection, where Config::wire is not plain; given to no other mesh
  bool partner = true;           // false: this rank has no connection to it, and exchanges nothing with it
};

// A connection that has outlived its mesh.
struct KeptSocket {
  int peer = -1;
  wire::Socket socket;
};

enum class ControlKind : uint8_t {
  ready = 1,
  withdraw = 2,
  batch = 3,
  withdrawn = 4,
  abort = 5,
  leave = 6,
  offer = 7,
  closing = 8,
  nudge = 9,  // wakes the receiver up and says nothing
};

struct ControlFrame {
  int peer = -1;  // sender, an index into the members
  ControlKind kind = ControlKind::ready;
  std::vector<uint32_t> ids;  // ready, withdraw, batch, withdrawn
  std::string text;           // abort, leave, closing: the sentence, naming who ends; ready, batch, offer: small data
};

// One direction of an exchange with one peer: bytes gathered from, or scattered to, the pieces in order.
struct Transfer {
  int peer = -1;
  std::vector<iovec> pieces;
};

// Transfers that were started together. Belongs to the caller and must live until finish() returned.
struct Flight {
  int open = 0;  // stripes that still move; only the mesh changes it
};

class Mesh {
 public:
  // peers[rank] of this rank itself is empty.
  static std::unique_ptr<Mesh> create(int rank, uint64_t epoch, std::vector<MeshPeer> peers, const Config& config,
                                      AbortSignal& abort, Status& status);
  virtual ~Mesh() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  // Whether every member is connected to every other; if not, algorithms exchange data with partners only
  // (collectives/partners.h). The same on all members.
  virtual bool is_full() const = 0;

  // Runs all transfers at once and returns when the last byte was sent and received. Both sides must call exchange with
  // matching transfers in the same order; a peer may appear once in `sends` and once in `receives`. Zero bytes are fine
  // and cost nothing. Control frames that arrive meanwhile are kept for next_control().
  virtual Status exchange(std::span<const Transfer> sends, std::span<const Transfer> receives) = 0;

  // exchange() in two halves, so that a pipeline keeps the wire busy while it computes: start() queues the transfers
  // and sends what the sockets take now, finish() moves everything until this flight is done. Between two ranks,
  // transfers match in the order in which they were started, whichever flight they belong to. Sent memory must not
  // change and received memory must not be read before the flight is done. When any of these calls fails, all flights
  // are dropped and their memory is not touched again; the mesh then answers every call with the same failure.
  virtual Status start(std::span<const Transfer> sends, std::span<const Transfer> receives, Flight& flight) = 0;
  virtual Status finish(Flight& flight) = 0;
  // Moves what can be moved without waiting. busy: whether some transfer is not done yet.
  virtual Status progress(bool& busy) = 0;

  // Sets a function that the driver calls again and again while finish() waits; when it fails, finish() fails. To be
  // set before the first transfer.
  virtual void while_waiting(std::function<Status()> act) = 0;

  // Queues a frame and sends what the socket takes now; the rest goes out with the next call of the driver. Any thread.
  virtual Status send_control(int peer, ControlKind kind, std::span<const uint32_t> ids,
                              std::string_view text = {}) = 0;

  // Takes the next frame that has arrived, without blocking; false when there is none.
  virtual Status next_control(ControlFrame& frame, bool& found) = 0;

  // Blocks until a frame may be there, wake(), abort, or the timeout. Fails when a peer is lost: its connection ended
  // without a leave or abort frame before it.
  virtual Status wait(int64_t timeout_us) = 0;
  virtual void wake() = 0;

  // Sets the peers from which control frames are expected. While the driver polls and expects no data, it looks at
  // their connections at each turn, and at all others now and then and before it sleeps. To be set before the first
  // wait.
  virtual void listen_to(const std::vector<int>& peers) = 0;

  // A source of news beside the sockets, which ends a wait() too.
  class PollSource {
   public:
    virtual ~PollSource() = default;
    virtual bool news() = 0;  // must only read; asked at every turn
    // True: the driver is about to sleep and then asks for news once more. From then on, and until this is called with
    // false, a member that has news for it must send it a `nudge`.
    virtual void sleeping(bool asleep) = 0;
  };
  virtual void set_poll_source(PollSource* source) = 0;  // before the first wait

  // Says whether the driver's thread has nothing else to do, so that it may look for news longer before it sleeps.
  virtual void set_patient(bool patient) = 0;

  // Tells every peer why this rank's epoch ends (kind abort or leave); nothing can be sent after it. Does not block:
  // what the sockets do not take is left to linger(). Any thread; with `leave` no transfer may be open.
  virtual void announce_end(ControlKind kind, std::string_view sentence) = 0;

  // After announce_end(): sends the rest of the control frames, for at most `limit_us`; after `abort` it drops the
  // transfers. The driver only.
  virtual void linger(int64_t limit_us) = 0;

  // At the very end, when nobody drives any more, and with Config::keeps_connections: gives away the connections that
  // the next epoch may use, and ends the sending side of all others. keep: false gives none away. On a connection that
  // is kept, any number of this epoch's bytes may be under way in both directions; who uses it must find their end
  // (worker/runtime/past_world.py). What is kept is no sign of the peer's life, and its end is no news of this epoch:
  // this rank has told that peer why it ends, or has heard so from it.
  virtual std::vector<KeptSocket> hand_over(bool keep) = 0;
};

}  // namespace horovod
