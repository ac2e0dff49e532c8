// The order log of members that are connected by a mesh. Rank 0 is the sequencer: members tell it what they have ready,
// it counts, and it tells everybody which batch runs next. Batches reach a member in the order of the sequencer's
// connection, so the log is the same everywhere.
//
//   ready      member -> sequencer   ids this member has arrived at, in order, and the small data of some of them
//   withdraw   member -> sequencer   ids it withdraws; answered by `withdrawn`, or by the batch that is on its way
//   batch      sequencer -> member   one batch. Without ids: the log is closed, the text says why
//   withdrawn  sequencer -> member   the answer
//   closing    member -> sequencer   a rank has left: one for which this member speaks or, in a tree, of which it heard
//
// Where ranks share memory, the members of the log are hosts. The first rank of a host speaks for it, and brings what
// the ranks of the host contribute together (host_leader_log.h).
//
// In a sparse mesh the frames go along a tree (log_tree.h). A member passes on what its children send to the sequencer,
// and the sequencer's answers to one of them, and sends each batch to all of its children before it runs the batch
// itself. A member with nothing to do passes nothing on. That delays no member below it: each id of a batch needs
// this member's arrival as well, and while an answer may be due this member drives. A stamp at the beginning of a
// frame's text names the member whose arrivals or withdrawals it holds, or for whom the answer is.
//
// Nothing is sent from arrive() and withdraw(): the driver sends what has gathered as one frame, whenever it looks for
// news (a driver asleep in wait() is woken for it). So a burst of arrivals costs one frame, work that becomes ready
// while a collective runs becomes one batch, and a caller that drives right after it arrived loses no time. The
// sequencer, too, decides in poll() only: the members wait while no thread of the sequencer drives.
//
// Small operations need no data phase. Their bytes come with `ready`; when all arrivals brought theirs, the sequencer
// computes the result, and it travels with `batch`. Whether an arrival brings bytes is each member's own choice; if one
// does not, the batch runs the ordinary way.
// A log of two members computes such results without the sequencer: pair_order_log.h.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/abort.h"
#include "collectives/hosts.h"
#include "engine/log_tree.h"
#include "engine/order_log.h"
#include "transport/mesh.h"

namespace horovod {

class MeshOrderLog : public OrderLog {
 public:
  // Makes the log for so many members. The arguments are those of the constructor.
  static std::unique_ptr<MeshOrderLog> make(Mesh& mesh, FuseRule fuse, AbortSignal& abort,
                                            const Hosts* hosts = nullptr);
  // hosts: null, or they are the log's members, and this is the leader of one.
  MeshOrderLog(Mesh& mesh, FuseRule fuse, AbortSignal& abort, const Hosts* hosts = nullptr);

  Status arrive(TensorId id) override { return arrive(id, nullptr); }
  Status arrive_with(TensorId id, Operation& operation) override { return arrive(id, &operation); }
  // The same for a host, with what its members contribute.
  Status arrive_combined(TensorId id, Operation& operation, std::string combined) {
    return arrive(id, &operation, &combined);
  }
  Status withdraw(TensorId id) override;
  Status poll(LogEvent& event) override;
  Status wait(int64_t until_us) override;
  void wake() override { mesh_.wake(); }

  // Sets what the sequencer calls for each arrival that it counts and for each that is withdrawn, with the innermost
  // lock held; and, after the arrival that completes an id, with `last`. To be called before the first arrive().
  using Watch = std::function<void(int member, TensorId id, Arrival what)>;
  void watch(Watch watch) { watch_ = std::move(watch); }

  // To be called when a rank has left for which this host's leader speaks: nothing more can be agreed. Driver only.
  Status depart(const std::string& sentence);
  // Whether a rank other than the sequencer has left while the log is not closed yet.
  bool anyone_departed() const { return !departed_.empty(); }

 protected:
  struct Own {  // what this member knows of an id
    Operation* operation = nullptr;
    bool arrived = false;  // has arrived, and poll() has not reported its batch yet
    bool settled = false;  // its batch or its withdrawal has come, and poll() has not reported it yet
  };
  struct Count {  // what the sequencer knows of an id
    uint32_t arrived = 0;
    uint32_t plain = 0;              // how many of the arrivals brought no bytes
    std::vector<bool> members;       // by member: whether it has arrived
    std::vector<bool> brought;       // by member: whether it brought bytes
    std::vector<std::string> bytes;  // by member: the bytes
  };
  struct Agreed {
    TensorId id;
    bool plain;
    std::vector<std::string> bytes;  // the bytes of all members, unless the operation is plain
  };
  struct Gathered {  // what the next frame will hold
    ControlKind kind;
    std::vector<TensorId> ids;
    std::string bytes;
  };

  int size() const { return static_cast<int>(peers_.size()); }
  int member() const { return member_of_peer_[static_cast<size_t>(mesh_.rank())]; }
  bool sequences() const { return mesh_.rank() == 0; }

  // What PairOrderLog does in another way. Called with mutex_ held:
  virtual Status add(TensorId id, std::string* bytes);  // this member has arrived and, unless null, brings these bytes
  virtual void withdraw_own(TensorId id);
  virtual void over(TensorId /*id*/, bool /*ran*/) {}  // this member's arrival at the id has run or was withdrawn
  virtual void closing() {}
  // Whether agreed operations need other members once the log is closed.
  virtual bool needs_others(bool /*plain*/) const { return true; }
  // Called by the driver, without mutex_:
  virtual Status finish(std::span<const Agreed> agreed);  // computes the results where all bytes have come
  virtual Status handle_offers(const ControlFrame& /*frame*/, bool& /*known*/) { return {}; }

  // With mutex_ held:
  Status count_own(TensorId id, const std::string* bytes);
  bool count(int member, TensorId id, const std::string_view* bytes);  // false: that member has arrived already
  bool uncount(int member, TensorId id);                               // false: agreed or never arrived
  bool gather(ControlKind kind, TensorId id, const std::string* bytes = nullptr);
  void agree(TensorId id, bool plain);
  void report_withdrawn(TensorId id);

  Status send_gathered();
  Status compute(const Agreed& agreed, Operation*& operation);
  Status bad_frame(const ControlFrame& frame, const std::string& what) const;

 private:
  Status arrive(TensorId id, Operation* operation, std::string* combined = nullptr);
  Status receive();
  Status handle(ControlFrame& frame);
  Status route(ControlFrame& frame, int& member, bool& passed_on);
  Status departure(int member, ControlFrame& frame, bool& handled);
  Status handle_as_sequencer(int member, ControlFrame& frame);
  Status handle_ready(int member, const ControlFrame& frame);
  Status handle_as_member(int member, ControlFrame& frame);
  Status handle_batch(ControlFrame& frame);
  Status decide();
  Status send_up(ControlKind kind, std::span<const TensorId> ids, std::string_view text);
  Status send_batch(std::span<const TensorId> ids, std::string_view text, int except = 0);
  Status send_withdrawn(int member, std::span<const TensorId> ids);
  bool report(LogEvent& event);
  bool close(std::string sentence);
  Status close_for_all(const std::string& sentence, int except);

 protected:
  Mesh& mesh_;
  const FuseRule fuse_;
  AbortSignal& abort_;
  const Hosts* const hosts_;
  std::vector<int> peers_;           // the rank in the mesh that is, or speaks for, each member
  std::vector<int> member_of_peer_;  // by rank in the mesh; -1: another rank speaks for it
  const LogTree tree_;
  Watch watch_;

  // Innermost lock of the log: neither the fuse rule nor the mesh is called with it. Guards the next block.
  std::mutex mutex_;
  std::deque<Gathered> gathered_;  // to be sent to the sequencer or, of two members, by it to the other
  std::vector<Own> own_;           // by id
  std::vector<Count> counts_;      // sequencer, by id
  std::vector<Agreed> agreed_;  // operations at which every member has arrived, in order, that are not yet in a batch
  std::vector<TensorId> withdrawn_;  // own ids, to be reported by poll()
  // Whether gathered_, and whether agreed_ or withdrawn_, hold anything. Written with mutex_ held. The driver reads
  // them without it (relaxed), and so does not lock for nothing: a change that it misses it sees in wait(), which locks
  // before it sleeps.
  std::atomic<bool> any_gathered_{false}, any_decided_{false};
  bool waiting_ = false;  // the driver is in wait() or about to sleep
  bool closed_ = false;

  // The rest belongs to the driver.
  std::deque<LogEvent> entries_;  // news of the log that poll() has not reported yet

 private:
  std::string why_closed_;
  std::string departed_;  // the sentence of a rank that has left while the sequencer has not closed the log yet
  int64_t departed_since_us_ = 0;
};

}  // namespace horovod
