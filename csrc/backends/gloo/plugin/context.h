// A transport for Gloo that sends over our mesh instead of sockets of Gloo's own.
//
// Gloo's TCP transport takes whoever connects first to its port for the peer, and a thread that waits in it can't be
// told that the epoch has ended. Over the mesh there is nothing to rendezvous: the connections are there, have proven
// the world's secret, notice a lost peer and name it, and have their deadline.
//
// Gloo names messages by slot; the mesh matches them by order. Gloo's collectives send and receive between two ranks in
// one order on both sides, and each message begins with its slot, so a collective that does not is an error, never
// wrong data.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <vector>

#include <gloo/common/error.h>
#include <gloo/context.h>
#include <gloo/transport/context.h>
#include <gloo/transport/pair.h>
#include <gloo/transport/unbound_buffer.h>

#include "base/abort.h"
#include "transport/mesh.h"

namespace horovod::gloo_plugin {

// Carries a Status through Gloo's code as an exception.
struct MeshError : ::gloo::Exception {
  explicit MeshError(Status cause) : ::gloo::Exception(cause.message()), status(std::move(cause)) {}
  Status status;
};

// What all buffers of one context share.
struct Link {
  Mesh& mesh;
  AbortSignal& abort;
  bool failed = false;  // the mesh has let go of all memory

  // Throws a failed status of the mesh as MeshError.
  void check(Status status);
  // Ends the epoch, because no transfer that is under way will be finished.
  [[noreturn]] void fail(Status status);
  void drop(Status cause);
};

class MeshBuffer final : public ::gloo::transport::UnboundBuffer {
 public:
  MeshBuffer(Link& link, void* memory, size_t bytes) : UnboundBuffer(memory, bytes), link_(link) {}
  ~MeshBuffer() override;

  void send(int peer, uint64_t slot, size_t offset, size_t bytes) override;
  void recv(int peer, uint64_t slot, size_t offset, size_t bytes) override;
  void recv(std::vector<int> peers, uint64_t slot, size_t offset, size_t bytes) override;

  // The mesh has its own deadline, so the timeouts of these are not used. Both throw MeshError.
  bool waitSend(int* peer, std::chrono::milliseconds timeout) override;
  bool waitRecv(int* peer, std::chrono::milliseconds timeout) override;

  // Nobody calls these: the abort signal ends a wait.
  void abortWaitSend() override {}
  void abortWaitRecv() override {}

 private:
  struct Message {
    int peer;
    uint64_t slot;
    uint64_t wire_slot;  // the slot, which is sent or received ahead of the bytes
    Flight flight;
  };
  using Messages = std::list<Message>;  // a list, because messages must not move while the mesh uses them

  Transfer transfer(Message& message, size_t offset, size_t bytes) const;
  Message await_one(Messages& messages);

  Link& link_;
  Messages sends_, receives_;  // messages under way, oldest first
};

class MeshTransport final : public ::gloo::transport::Context {
 public:
  MeshTransport(Mesh& mesh, AbortSignal& abort);

  std::unique_ptr<::gloo::transport::UnboundBuffer> createUnboundBuffer(void* memory, size_t bytes) override {
    return std::make_unique<MeshBuffer>(link_, memory, bytes);
  }
  std::unique_ptr<::gloo::transport::Pair>& createPair(int peer) override { return pairs_[peer]; }

 private:
  Link link_;
};

// The context that Gloo's collectives are given.
class MeshContext final : public ::gloo::Context {
 public:
  MeshContext(Mesh& mesh, AbortSignal& abort) : Context(mesh.rank(), mesh.size()) {
    transportContext_ = std::make_shared<MeshTransport>(mesh, abort);
  }
};

}  // namespace horovod::gloo_plugin
