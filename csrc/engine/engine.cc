#include "engine/engine.h"

#include <algorithm>
#include <ctime>
#include <limits>
#include <numeric>
#include <optional>
#include <thread>
#include <tuple>
#include <utility>

#include <unistd.h>

#include "engine/waiting_thread.h"
#include "kernels/kernels.h"

namespace horovod {
namespace {

Status check_config(const Config& config) {
  if (config.staging_buffer_count < 2 || config.staging_buffer_count > 64) {
    return {Code::invalid_argument, error_code::invalid_setting, "staging_buffer_count must be between 2 and 64."};
  }
  if (config.staging_buffer_bytes < 4096 || config.staging_buffer_bytes % 4096 != 0 ||
      config.staging_buffer_bytes > (64u << 20)) {
    return {Code::invalid_argument, error_code::invalid_setting,
            "staging_buffer_bytes must be a multiple of 4096 between 4096 and 64 MiB."};
  }
  if (config.staging_bytes < (16u << 10) || config.staging_bytes > (256u << 20)) {
    return {Code::invalid_argument, error_code::invalid_setting, "staging_bytes must be between 16 KiB and 256 MiB."};
  }
  return {};
}

std::string listed(const std::vector<int>& ranks) {
  std::string text = "[";
  for (size_t i = 0; i < ranks.size(); ++i) text += (i > 0 ? ", " : "") + std::to_string(ranks[i]);
  return text + "]";
}

}  // namespace

size_t Engine::segment_bytes(const Config& config) { return horovod::segment_bytes(config); }

std::unique_ptr<Engine> Engine::create(WorldSpec world, const Config& config, Status& status) {
  DescriptorOwner descriptors(world.sockets);
  std::unique_ptr<Engine> engine(new Engine());
  engine->owner_process_ = getpid();
  const int size = static_cast<int>(world.labels.size());
  if (status = check_config(config); !status.ok()) return nullptr;
  if (world.rank < 0 || world.rank >= size) {
    status = {Code::invalid_argument, error_code::internal,
              "Rank " + std::to_string(world.rank) + " is not in a world of " + std::to_string(size) + "."};
    return nullptr;
  }
  engine->config_ = config;
  engine->epoch_ = world.epoch;
  engine->rank_ = world.rank;
  engine->labels_ = world.labels;
  if (world.placement.empty()) world.placement.assign(static_cast<size_t>(size), 0);
  if (static_cast<int>(world.placement.size()) != size) {
    status = {Code::invalid_argument, error_code::internal,
              "The placement of " + std::to_string(world.placement.size()) + " ranks is given for " +
                  std::to_string(size) + "; there must be one host for each."};
    return nullptr;
  }
  engine->placement_ = std::move(world.placement);
  std::vector<int> ranks(static_cast<size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  engine->global_ = std::make_shared<Communicator>(
      Members{0, world.rank, std::move(ranks), world.labels, engine->placement_}, config, engine->abort_,
      engine->outbox_, *engine->timeline_, [self = engine.get()] { self->tell_abort(); });
  world.sockets = descriptors.release();
  status = attach_to_peers(*engine->global_, engine->labels_, std::move(static_cast<Paths&>(world)), engine->config_,
                           world.epoch, engine->abort_);
  if (!status.ok()) return nullptr;
  return engine;
}

void Engine::dispose(std::unique_ptr<Engine> engine) {
  if (!engine || engine->owner_process_ != getpid()) return;  // the destructor knows what to do in a forked child
  if (!engine->close("").ok()) (void)engine.release();
}

Engine::~Engine() {
  if (owner_process_ == getpid()) {
    (void)close("");  // where that fails, ~Communicator() ends the process: a stuck engine must not be destroyed
    return;
  }
  // A forked child: the threads are not here and the memory is not mapped, so leave everything alone.
  new std::shared_ptr<Communicator>(std::move(global_));
  new std::map<int, ProcessSet>(std::move(sets_));
  new std::unique_ptr<Timeline>(std::move(timeline_));
  new std::unique_ptr<Completions>(std::move(completions_));
  new SharedGpu(std::move(gpu_));
}

// -- process sets -----------------------------------------------------------------------------------------------------

Status Engine::add_process_set(ProcessSetSpec spec) {
  DescriptorOwner descriptors(spec.sockets);
  const int size = static_cast<int>(labels_.size());
  const auto invalid = [&](const std::string& what) {
    return Status(Code::invalid_argument, error_code::internal,
                  "Process set " + std::to_string(spec.number) + " " + what);
  };
  if (spec.number <= 0) return invalid("needs a number above 0.");
  if (spec.ranks.empty()) return invalid("has no ranks.");
  for (size_t i = 0; i < spec.ranks.size(); ++i) {
    if (spec.ranks[i] < 0 || spec.ranks[i] >= size) {
      return invalid("has rank " + std::to_string(spec.ranks[i]) + ", but the ranks of the world are 0 to " +
                     std::to_string(size - 1) + ".");
    }
    if (i > 0 && spec.ranks[i] <= spec.ranks[i - 1]) return invalid("has ranks that are not in ascending order.");
  }
  ProcessSet made{spec.ranks, nullptr};
  const auto mine = std::lower_bound(spec.ranks.begin(), spec.ranks.end(), rank_);
  if (mine != spec.ranks.end() && *mine == rank_) {
    std::vector<std::string> labels;
    std::vector<int> placement;
    std::map<int, std::vector<int>> sockets = descriptors.release(), by_member;
    for (int rank : spec.ranks) {
      if (const auto found = sockets.find(rank); found != sockets.end()) {
        by_member[static_cast<int>(labels.size())] = std::move(found->second);
        sockets.erase(found);
      }
      labels.push_back(labels_[rank]);
      placement.push_back(placement_[rank]);
    }
    DescriptorOwner strangers(sockets);
    Members members{spec.number, static_cast<int>(mine - spec.ranks.begin()), spec.ranks, labels, std::move(placement)};
    Config config = config_;
    config.keeps_connections = false;  // the next epoch begins with a world
    made.communicator = std::make_shared<Communicator>(std::move(members), config, abort_, outbox_, *timeline_,
                                                       [this] { tell_abort(); });
    spec.sockets = std::move(by_member);
    HVD_TRY(attach_to_peers(*made.communicator, std::move(labels), std::move(static_cast<Paths&>(spec)), config, epoch_,
                            abort_));
  }
  const std::shared_ptr<Communicator> communicator = made.communicator;
  Status status;
  {
    const std::lock_guard<std::mutex> lock(sets_mutex_);
    if (closed_) {
      status = {Code::aborted, error_code::shut_down, "Horovod has been shut down."};
    } else if (!sets_.emplace(spec.number, std::move(made)).second) {
      status = invalid("is registered already.");
    }
  }
  if (!communicator) return status;
  if (!status.ok()) {
    (void)communicator->close("");  // nothing has been submitted to it
  } else if (abort_.raised()) {
    communicator->abort_raised();  // the thread that raised it may have looked at sets_ before
  }
  return status;
}

void Engine::remove_process_set(int number) {
  const std::shared_ptr<Communicator> removed = communicator(number);
  if (removed) {  // closed before it is erased, because wait() must find it as long as it has operations
    const std::string which = "he process set of ranks " + listed(removed->ranks());
    const Status closed =
        removed->close(coded(error_code::no_such_process_set, capitalized(labels_[rank_]) + " has removed t" + which +
                                                                  ", so operations in it can't complete."),
                       coded(error_code::no_such_process_set, "T" + which + " has been removed."));
    if (!closed.ok()) {
      is_stuck_.store(true, std::memory_order_release);
      outbox_.note(true, closed.message());
      const std::lock_guard<std::mutex> lock(sets_mutex_);
      stuck_.push_back(removed);
    }
  }
  const std::lock_guard<std::mutex> lock(sets_mutex_);
  if (sets_.erase(number) > 0 && removed) removed->add_counts(removed_counts_);
}

int64_t Engine::pending(int process_set) {
  const std::shared_ptr<Communicator> found = communicator(process_set);
  return found ? found->pending() : 0;
}

size_t Engine::known() const {
  size_t count = 0;
  for (const std::shared_ptr<Communicator>& one : communicators()) count += one->known();
  return count;
}

std::shared_ptr<Communicator> Engine::communicator(int process_set) const {
  if (process_set == 0) return global_;
  const std::lock_guard<std::mutex> lock(sets_mutex_);
  const auto found = sets_.find(process_set);
  return found == sets_.end() ? nullptr : found->second.communicator;
}

std::vector<std::shared_ptr<Communicator>> Engine::communicators() const {
  std::vector<std::shared_ptr<Communicator>> all{global_};
  const std::lock_guard<std::mutex> lock(sets_mutex_);
  for (const auto& [number, set] : sets_) {
    if (set.communicator) all.push_back(set.communicator);
  }
  return all;
}

// -- operations -------------------------------------------------------------------------------------------------------

Status Engine::route(Submission& submission, std::shared_ptr<Communicator>& communicator) const {
  OpSpec& spec = submission.spec;
  const auto refused = [&](ErrorCode error, const std::string& what) {
    return Status(Code::invalid_argument, error, spec.name + ": " + what);
  };
  if (spec.process_set == 0) {
    communicator = global_;
  } else {
    const std::lock_guard<std::mutex> lock(sets_mutex_);
    const auto found = sets_.find(spec.process_set);
    if (found == sets_.end()) {
      return refused(error_code::no_such_process_set,
                     "process set " + std::to_string(spec.process_set) + " is not registered.");
    }
    communicator = found->second.communicator;
    if (!communicator) {
      return refused(error_code::not_in_process_set, "Rank " + std::to_string(rank_) +
                                                         " is not a member of the provided process set (ranks " +
                                                         listed(found->second.ranks) + ").");
    }
  }
  const int size = communicator->size();
  if (submission.on_device && !traits_of(spec.type).on_device) {
    return refused(
        error_code::wrong_tensor,
        std::string(name_of(spec.type)) + " does not take tensors on a GPU yet. Copy them to the host's memory first.");
  }
  if (spec.tensors.empty() && !traits_of(spec.type).no_tensors)
    return refused(error_code::invalid_operation, "there is no tensor.");
  for (size_t i = 0; i < spec.tensors.size(); ++i) {
    const TensorSpec& tensor = spec.tensors[i];
    if (submission.spans[i].count > 0 && submission.spans[i].input == nullptr)
      return refused(error_code::wrong_tensor, "a tensor has no memory.");
    const bool scalar = tensor.shape.empty();
    if (traits_of(spec.type).reduces) {
      const ReduceOp op = spec.reduce_op;
      if (const Status status = kernels::check_reduction(tensor.dtype, op); !status.ok()) {
        return {status.code(), spec.name + ": " + status.message()};
      }
    }
    if (spec.type == OpType::reducescatter) {
      if (scalar) {
        return refused(error_code::no_rows, "reducescatter needs a tensor of at least one dimension, not a scalar.");
      }
      if (spec.reduce_op != ReduceOp::sum && spec.reduce_op != ReduceOp::average) {
        return {Code::precondition, error_code::undefined_reduction,
                spec.name + ": reducescatter supports Sum and Average only."};
      }
    }
  }
  // The Adasum of a single rank's tensor is the tensor itself, like its sum. It has passed the checks of all Adasums.
  if (size == 1 && spec.reduce_op == ReduceOp::adasum) spec.reduce_op = ReduceOp::sum;
  if (traits_of(spec.type).rooted) {
    const std::vector<int>& ranks = communicator->ranks();
    const auto found = std::lower_bound(ranks.begin(), ranks.end(), spec.root);
    if (found == ranks.end() || *found != spec.root) {
      return refused(
          error_code::invalid_root,
          "root rank " + std::to_string(spec.root) +
              (spec.process_set == 0 ? " is not in the world, whose ranks are 0 to " + std::to_string(size - 1) + "."
                                     : " is not a member of the provided process set (ranks " + listed(ranks) + ")."));
    }
    spec.root = static_cast<int>(found - ranks.begin());
  }
  if (spec.type == OpType::alltoall && !spec.tensors.empty() && !spec.tensors[0].shape.empty()) {
    const int64_t rows = spec.tensors[0].rows();
    if (submission.splits.empty()) {
      if (rows % size != 0) {
        return refused(error_code::wrong_splits, "the first dimension (" + std::to_string(rows) +
                                                     ") must be a multiple of the number of ranks (" +
                                                     std::to_string(size) + ") when no splits are given.");
      }
      if (rows / size > std::numeric_limits<int32_t>::max()) {
        return refused(error_code::wrong_splits,
                       "each rank would get " + std::to_string(rows / size) +
                           " rows, more than received_splits can say (2147483647). Use wider rows, or several calls.");
      }
    } else {
      if (static_cast<int>(submission.splits.size()) != size) {
        return refused(error_code::wrong_splits, "splits has " + std::to_string(submission.splits.size()) +
                                                     " entries for " + std::to_string(size) + " ranks.");
      }
      int64_t sum = 0;
      for (int32_t split : submission.splits) {
        if (split < 0) return refused(error_code::wrong_splits, "splits must not be negative.");
        sum += split;
      }
      if (sum > rows) {
        return refused(error_code::wrong_splits, "the sum of splits (" + std::to_string(sum) +
                                                     ") is greater than the first dimension (" + std::to_string(rows) +
                                                     ").");
      }
    }
  }
  return {};
}

Status Engine::start(const std::shared_ptr<Submission>& submission, Start start) {
  kept_.sweep(stuck());
  std::shared_ptr<Communicator> communicator;
  HVD_TRY(route(*submission, communicator));
  if (submission->on_device) [[unlikely]]
    HVD_TRY(prepare_device(*submission, *communicator));
  if (submission->on_done) [[unlikely]] {
    completions_->start();
    submission->completions = completions_.get();
  }
  submission->number = started_.fetch_add(1, std::memory_order_relaxed);
  return communicator->submit(submission, start);
}

bool Engine::wait(Submission& submission, int64_t timeout_us) {
  if (submission.spec.process_set == 0) return global_->wait(submission, timeout_us);
  const std::shared_ptr<Communicator> found = communicator(submission.spec.process_set);
  // All operations of a removed set have finished or failed.
  return found ? found->wait(submission, timeout_us) : submission.is_done();
}

bool Engine::tell_when_done(const std::shared_ptr<Submission>& submission, OnDone on_done) {
  completions_->start();
  const std::shared_ptr<Communicator> found = communicator(submission->spec.process_set);
  return found && found->tell_when_done(*submission, std::move(on_done), *completions_);
}

void Engine::abandon(std::shared_ptr<Submission> submission, KeepAlive used) {
  if (!is_over(*submission) || stuck()) kept_.add(std::move(submission), std::move(used));
}

Status Engine::collect(const std::shared_ptr<Submission>& submission, std::optional<uintptr_t> stream,
                       const std::function<KeepAlive()>& used) {
  if (submission->on_device) [[unlikely]] {
    const uintptr_t submitted_on = submission->on_device->stream;
    const uintptr_t handed_to = stream.value_or(submitted_on);
    const Status status = hand_over(*submission, handed_to);
    // The stream on which the tensors were used waits for the end from now on, and a framework gives their memory to
    // others in the order of that stream. So the memory of a gradient that is dropped after this is free at once.
    if (!status.ok() || handed_to != submitted_on) kept_.add_in_order(submission, used());
    if (!status.ok()) return status;
  }
  if (!submission->status.ok() && stuck()) [[unlikely]]
    kept_.add(submission, used());
  return submission->status;
}

BlockedReport Engine::blocked_report() const {
  constexpr size_t kMostOperations = 1000, kMostBytes = 256 << 10;
  BlockedReport found;
  const bool all_blocked = WaitingThread::all_blocked();
  found.started = started_.load(std::memory_order_relaxed);
  for (const std::shared_ptr<Communicator>& one : communicators()) one->add_to(found);
  found.all_threads = all_blocked && std::none_of(found.unfinished.begin(), found.unfinished.end(),
                                                  [](const Unfinished& one) { return one.by_graph; });
  timespec computed{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &computed);
  found.cpu_us = computed.tv_sec * 1'000'000 + computed.tv_nsec / 1000;
  std::sort(found.unfinished.begin(), found.unfinished.end(),
            [](const Unfinished& a, const Unfinished& b) { return a.number < b.number; });
  size_t kept = 0, bytes = 0;
  while (kept < found.unfinished.size() && kept < kMostOperations && bytes < kMostBytes) {
    bytes += found.unfinished[kept++].name.size();
  }
  found.cut_short = kept < found.unfinished.size();
  found.unfinished.resize(kept);
  // Those that are used most are kept: the calls of a loop.
  std::sort(found.unnamed.begin(), found.unnamed.end(), [](const Unnamed& a, const Unnamed& b) {
    return std::tie(b.count, a.process_set, a.name) < std::tie(a.count, b.process_set, b.name);
  });
  if (found.unnamed.size() > BlockedReport::kMostUnnamed) found.unnamed.resize(BlockedReport::kMostUnnamed);
  return found;
}

// -- the end ----------------------------------------------------------------------------------------------------------

void Engine::peer_left(int rank, const std::string& sentence) {
  {
    const std::lock_guard<std::mutex> lock(sets_mutex_);
    if (left_.empty()) left_ = sentence;
  }
  for (const std::shared_ptr<Communicator>& one : communicators()) one->peer_left(rank, sentence);
}

void Engine::abort(const std::string& sentence) {
  abort_.raise({Code::aborted, sentence});
  tell_abort();
}

void Engine::tell_abort() {
  for (const std::shared_ptr<Communicator>& one : communicators()) one->abort_raised();
  const auto [rank, process_ended] = lost_peer();
  if (rank < 0 || told_lost_.exchange(true, std::memory_order_relaxed)) return;
  outbox_.push({.kind = OutboxItem::lost, .rank = rank, .process_ended = process_ended});
}

std::pair<int, bool> Engine::lost_peer() const {
  const std::optional<LostPeer> lost = abort_.lost();
  if (!lost) return {-1, false};
  const auto found = std::find(labels_.begin(), labels_.end(), lost->label);  // each rank has a label of its own
  return {found == labels_.end() ? -1 : static_cast<int>(found - labels_.begin()), lost->process_ended};
}

Status Engine::ended() const {
  if (abort_.raised()) return abort_.cause();
  const std::lock_guard<std::mutex> lock(sets_mutex_);
  if (!left_.empty()) return {Code::left, left_};
  return closed_ ? Status(Code::aborted, error_code::shut_down, "Horovod has been shut down.") : Status();
}

Status Engine::close(const std::string& sentence, bool keep) {
  if (!global_) return {};  // create() failed early
  const std::string left = sentence.empty() ? capitalized(labels_[rank_]) +
                                                  " has shut down (it called hvd.shutdown() or its script ended), so "
                                                  "operations that wait for it can't complete."
                                            : sentence;
  const std::string farewell = has_code(left) ? left : coded(error_code::shut_down, left);
  {
    const std::lock_guard<std::mutex> lock(sets_mutex_);
    closed_ = true;
  }
  // All are closed at the same time, because each may wait a while for its peers.
  const std::vector<std::shared_ptr<Communicator>> all = communicators();
  std::vector<Status> closed(all.size());  // each is written by one thread
  std::vector<std::thread> closers;
  for (size_t i = 1; i < all.size(); ++i) closers.emplace_back([&, i] { closed[i] = all[i]->close(farewell); });
  closed[0] = all[0]->close(farewell);
  for (std::thread& closer : closers) closer.join();
  outbox_.close();
  const auto stuck = std::find_if(closed.begin(), closed.end(), [](const Status& one) { return !one.ok(); });
  if (stuck != closed.end()) is_stuck_.store(true, std::memory_order_release);
  if (stuck != closed.end()) return *stuck;
  std::vector<KeptSocket> kept = global_->hand_over(keep);
  const std::lock_guard<std::mutex> lock(sets_mutex_);
  for (KeptSocket& one : kept) kept_sockets_.push_back(std::move(one));
  return is_stuck_.load(std::memory_order_acquire)
             ? Status(Code::timeout, error_code::stuck_thread,
                      "A thread is still in an operation of a process set that was removed.")
             : Status();
}

std::vector<KeptSocket> Engine::kept_sockets() {
  const std::lock_guard<std::mutex> lock(sets_mutex_);
  return std::exchange(kept_sockets_, {});
}

std::map<std::string, uint64_t> Engine::counters() const {
  Counts counts;
  global_->add_counts(counts);
  const std::lock_guard<std::mutex> lock(sets_mutex_);
  for (const auto& [number, set] : sets_) {
    if (set.communicator) set.communicator->add_counts(counts);
  }
  for (const auto& [name, count] : removed_counts_) counts[name] += count;
  return counts;
}

}  // namespace horovod
