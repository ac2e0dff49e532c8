#include "backends/gloo/plugin/context.h"

#include <algorithm>
#include <exception>
#include <string>

namespace horovod::gloo_plugin {
namespace {

// Gloo looks whether there is a pair for each peer before it starts. What it could do with one belongs to its older
// collectives, which we don't call.
class Connected final : public ::gloo::transport::Pair {
 public:
  explicit Connected(Link& link) : link_(link) {}

  const ::gloo::transport::Address& address() const override { refuse(); }
  void connect(const std::vector<char>&) override { refuse(); }
  void close() override {}
  void setSync(bool, bool) override { refuse(); }
  std::unique_ptr<::gloo::transport::Buffer> createSendBuffer(int, void*, size_t) override { refuse(); }
  std::unique_ptr<::gloo::transport::Buffer> createRecvBuffer(int, void*, size_t) override { refuse(); }
  void send(::gloo::transport::UnboundBuffer*, uint64_t, size_t, size_t) override { refuse(); }
  void recv(::gloo::transport::UnboundBuffer*, uint64_t, size_t, size_t) override { refuse(); }

 private:
  [[noreturn]] void refuse() const {
    link_.fail({Code::internal, error_code::gloo_failed,
                "A collective of Gloo asks for a connection of its own, which there is none of."});
  }

  Link& link_;
};

}  // namespace

void Link::check(Status status) {
  if (status.ok()) return;
  failed = true;
  throw MeshError(std::move(status));
}

void Link::drop(Status cause) {
  if (failed) return;
  failed = true;
  abort.raise(std::move(cause));
  Flight none;
  (void)mesh.finish(none);  // so that the mesh sees the abort signal
}

void Link::fail(Status status) {
  drop(status);
  throw MeshError(std::move(status));
}

MeshBuffer::~MeshBuffer() {
  if (sends_.empty() && receives_.empty()) return;
  // A collective that returns has waited for everything, so it was left by an exception. The mesh lets go of memory
  // only when a transfer is done or when it has failed for good.
  link_.drop({Code::internal, error_code::gloo_failed,
              "Rank " + std::to_string(link_.mesh.rank()) +
                  " of the mesh left a collective of Gloo in the middle, so this world ends."});
}

Transfer MeshBuffer::transfer(Message& message, size_t offset, size_t bytes) const {
  if (bytes == kUnspecifiedByteCount) bytes = size - std::min(offset, size);
  if (offset > size || bytes > size - offset) {
    link_.fail({Code::internal, error_code::gloo_failed,
                "Gloo wants to move " + std::to_string(bytes) + " bytes at " + std::to_string(offset) +
                    " of a buffer of " + std::to_string(size) + "."});
  }
  Transfer made;
  made.peer = message.peer;
  made.pieces.push_back({&message.wire_slot, sizeof(message.wire_slot)});
  if (bytes > 0) made.pieces.push_back({static_cast<std::byte*>(ptr) + offset, bytes});
  return made;
}

void MeshBuffer::send(int peer, uint64_t slot, size_t offset, size_t bytes) {
  Message& message = sends_.emplace_back(Message{peer, slot, slot, {}});
  const Transfer out[] = {transfer(message, offset, bytes)};
  link_.check(link_.mesh.start(out, {}, message.flight));
}

void MeshBuffer::recv(int peer, uint64_t slot, size_t offset, size_t bytes) {
  Message& message = receives_.emplace_back(Message{peer, slot, 0, {}});
  const Transfer in[] = {transfer(message, offset, bytes)};
  link_.check(link_.mesh.start({}, in, message.flight));
}

void MeshBuffer::recv(std::vector<int>, uint64_t, size_t, size_t) {
  link_.fail({Code::internal, error_code::gloo_failed,
              "A collective of Gloo receives from any rank, which the mesh can't do."});
}

MeshBuffer::Message MeshBuffer::await_one(Messages& messages) {
  if (messages.empty()) {
    link_.fail(
        {Code::internal, error_code::gloo_failed, "A collective of Gloo waits for a message that it has not started."});
  }
  auto ready =
      std::find_if(messages.begin(), messages.end(), [](const Message& message) { return message.flight.open == 0; });
  if (ready == messages.end()) {
    ready = messages.begin();
    link_.check(link_.mesh.finish(ready->flight));
  }
  const Message done = *ready;
  messages.erase(ready);
  return done;
}

bool MeshBuffer::waitSend(int* peer, std::chrono::milliseconds) {
  const Message done = await_one(sends_);
  if (peer) *peer = done.peer;
  return true;
}

bool MeshBuffer::waitRecv(int* peer, std::chrono::milliseconds) {
  const Message done = await_one(receives_);
  if (done.wire_slot != done.slot) {
    link_.fail({Code::aborted, error_code::unexpected_data,
                "Rank " + std::to_string(done.peer) + " of the mesh sent message " + std::to_string(done.wire_slot) +
                    " of Gloo where " + std::to_string(done.slot) +
                    " was expected: the ranks do not run the same "
                    "operation or not the same version of Gloo, so this world ends."});
  }
  if (peer) *peer = done.peer;
  return true;
}

MeshTransport::MeshTransport(Mesh& mesh, AbortSignal& abort) : Context(mesh.rank(), mesh.size()), link_{mesh, abort} {
  pairs_.resize(mesh.size());
  for (int peer = 0; peer < mesh.size(); ++peer) {
    if (peer != mesh.rank()) pairs_[peer] = std::make_unique<Connected>(link_);
  }
}

}  // namespace horovod::gloo_plugin
