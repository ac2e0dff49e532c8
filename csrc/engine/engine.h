// The engine of one member of one world: it connects to its peers, runs operations, and ends. It owns everything that
// belongs to an epoch, so a process may have several engines at a time (tests do), and a new epoch gets a new engine.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "backends/gpu/shared_gpu.h"
#include "engine/communicator.h"
#include "engine/completions.h"
#include "engine/kept.h"
#include "engine/paths.h"

namespace horovod {

struct WorldSpec : Paths {
  int rank = 0;
  uint64_t epoch = 0;
  std::vector<std::string> labels;  // one for each rank
  std::vector<int> placement;       // by rank: equal on one host, as users count hosts; empty: there is one host
};

// A subset of the world that runs operations of its own. `ranks` are ranks of the world, ascending; whatever else
// belongs to a member is in that order.
struct ProcessSetSpec : Paths {
  int number = 0;  // the set's number for submissions and the coordinator; not used again in this epoch
  std::vector<int> ranks;
};

class Engine {
 public:
  // How many bytes the segment of a member has.
  static size_t segment_bytes(const Config& config);

  // Maps the peers' segments or takes over the sockets.
  static std::unique_ptr<Engine> create(WorldSpec world, const Config& config, Status& status);
  // Closes the communicator; if that fails, keeps it for ever.
  static void dispose(std::unique_ptr<Engine> engine);
  ~Engine();

  // Checks the arguments and starts the operation.
  Status start(const std::shared_ptr<Submission>& submission, Start start);
  bool wait(Submission& submission, int64_t timeout_us);
  // For a thread that has waited and does not wait any longer: `on_done` is called once, as if it had been given to
  // start(). False where the operation is done; `on_done` is then not called.
  bool tell_when_done(const std::shared_ptr<Submission>& submission, OnDone on_done);
  // The outcome of an operation that is done; called once. On a device: work that is queued on the framework's `stream`
  // (default: that of the submission) after this call finds the result. It fails if the epoch ended before the device
  // had finished. What `used` returns is kept if the tensors' memory may still be in use after this call: by a device,
  // where another stream waits for it, or by a thread that is stuck.
  Status collect(const std::shared_ptr<Submission>& submission, std::optional<uintptr_t> stream,
                 const std::function<KeepAlive()>& used);
  // The caller will not wait for the operation: keeps the memory that it uses until it is over. Each start() releases
  // what is over by then.
  void abandon(std::shared_ptr<Submission> submission, KeepAlive used);
  // Whether a wait for the operation would return at once: the operation is done, and where the host waits for devices
  // its result is there.
  bool over(const Submission& submission) const;

  // Every rank of the world registers a set under the same number; ranks outside of it give no segment and no sockets.
  // The caller makes sure that all ranks do so, and that no operation runs in a set when it is removed.
  Status add_process_set(ProcessSetSpec spec);
  void remove_process_set(int number);
  // The number of this rank's operations that are under way in a set.
  int64_t pending(int process_set);

  int rank() const { return rank_; }

  // How many kinds of operations (names and signatures) are remembered, in all sets.
  size_t known() const;

  // Queues a copy within the memory of this rank's GPU on the framework's `stream`.
  Status copy_on_gpu(int ordinal, void* to, const void* from, size_t bytes, uintptr_t stream);

  // Called before a join: the GPU on which this rank may contribute zeros, though it has used none yet.
  void join_from(int ordinal);

  Outbox& outbox() { return outbox_; }
  Timeline& timeline() { return *timeline_; }
  // The communicator; null for a set that does not exist or that this rank is not a member of.
  std::shared_ptr<Communicator> communicator(int process_set) const;

  BlockedReport blocked_report() const;

  void peer_left(int rank, const std::string& sentence);
  void abort(const std::string& sentence);
  // Why nothing that needs all ranks can succeed any more; ok while that is not so.
  Status ended() const;
  // For a caller that has waited until its device has nothing left to do: ok if all operations that collect() handed
  // over have left their results there. collect() does not wait for the device, and where the epoch ends meanwhile,
  // what is queued behind an operation finds no result.
  Status results() const;
  // Fails when a thread does not come back from an operation, see Communicator::close(): then neither the engine nor
  // any tensor of an operation that is not done may be destroyed.
  // keep: the connections to peers may serve the next epoch of this process; kept_sockets() then has those that can.
  Status close(const std::string& sentence, bool keep = false);
  // Once, after close(): the connections that it has kept, each with the rank that it leads to. Those that are not
  // asked for are closed with the engine.
  std::vector<KeptSocket> kept_sockets();
  // Whether close() has failed.
  bool stuck() const { return is_stuck_.load(std::memory_order_acquire); }
  std::map<std::string, uint64_t> counters() const;
  // The rank that this engine itself has found to be lost, and whether its process has ended; -1: none. The outbox gets
  // the same once.
  std::pair<int, bool> lost_peer() const;

 private:
  struct ProcessSet {
    std::vector<int> ranks;
    std::shared_ptr<Communicator> communicator;  // null on ranks that are no members
  };
  using Counts = std::map<std::string, uint64_t>;

  Engine() = default;
  Status hand_over(Submission& submission, uintptr_t stream);
  Status prepare_device(Submission& submission, Communicator& communicator);
  // Opens the GPU with this ordinal, unless the engine uses a GPU already: then `gpu` is that one.
  Status open_gpu(int ordinal, SharedGpu& gpu);
  // The same, but another GPU than that one is an error.
  Status open_own_gpu(int ordinal, SharedGpu& gpu);
  // Checks the arguments and finds out where they go; a root becomes a place among the members.
  Status route(Submission& submission, std::shared_ptr<Communicator>& communicator) const;
  std::vector<std::shared_ptr<Communicator>> communicators() const;
  void tell_abort();

  Config config_;
  uint64_t epoch_ = 0;
  int rank_ = 0;
  std::vector<std::string> labels_;
  std::vector<int> placement_;  // placement_[rank]
  AbortSignal abort_;
  Outbox outbox_;
  std::unique_ptr<Timeline> timeline_ = std::make_unique<Timeline>();
  Kept kept_;
  std::unique_ptr<Completions> completions_ = std::make_unique<Completions>();  // before communicators, which add to it
  std::shared_ptr<Communicator> global_;
  int owner_process_ = 0;

  mutable std::mutex gpu_mutex_;  // guards gpu_
  SharedGpu gpu_;                 // the one GPU of this engine; empty before its first operation on a GPU

  mutable std::mutex sets_mutex_;  // guards the block below; no communicator's lock is taken with it
  std::map<int, ProcessSet> sets_;
  Counts removed_counts_;  // the counts of sets that were removed
  std::string left_;       // the sentence of the first peer that left
  bool closed_ = false;
  std::vector<KeptSocket> kept_sockets_;
  std::vector<std::shared_ptr<Communicator>> stuck_;  // communicators of removed sets that have to be kept

  std::atomic<bool> is_stuck_{false};   // set once, released when close() of a communicator has failed
  std::atomic<bool> told_lost_{false};  // the thread that sets it tells of the loss; relaxed, it orders nothing
  std::atomic<uint64_t> started_{0};    // numbers operations; relaxed, it orders nothing else
};

}  // namespace horovod
