// Stress for the sanitizers (`make sanitize`): worlds of 2 to 4 engines in this process, several threads for each rank
// that submit random operations in random order, in the world and in process sets that come and go, ranks that join
// early, checked results, and worlds that end in order, by abort, or in the middle of everything. Usage: engine_stress
// [worlds] [seed] [in_process|tcp|hosts|shm|all]
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <barrier>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "engine/engine.h"
#include "timeline_folder.h"

using namespace horovod;

namespace {

// Plays the coordinator: gives a name its id when every rank has announced it or joined, recalls ids now and then.
class Negotiator {
 public:
  explicit Negotiator(std::vector<std::unique_ptr<Engine>>& engines) : engines_(engines) {
    std::vector<int> everyone(engines.size());
    std::iota(everyone.begin(), everyone.end(), 0);
    add_set(0, everyone);
    for (size_t rank = 0; rank < engines.size(); ++rank) threads_.emplace_back([this, rank] { serve(rank); });
  }
  ~Negotiator() {
    for (std::thread& thread : threads_) thread.join();
  }
  void add_set(int number, const std::vector<int>& ranks) {
    const std::lock_guard<std::mutex> lock(mutex_);
    sets_[number].ranks = ranks;
  }

 private:
  struct Set {
    std::vector<int> ranks;
    std::map<std::string, std::set<size_t>> announced;
    std::map<std::string, OpSpec> specs;
    std::map<TensorId, std::set<size_t>> answers;
    std::set<std::string> taken_back;
    std::vector<TensorId> free;
    TensorId next = 0;
  };

  void serve(size_t rank) {
    std::vector<OutboxItem> items;
    while (engines_[rank]->outbox().take(1000, items)) {
      for (OutboxItem& item : items) {
        if (item.kind == OutboxItem::announce) announce(rank, item.process_set, item.spec);
        if (item.kind == OutboxItem::join) join(static_cast<int>(rank), item.round, item.without_zeros);
        if (item.kind == OutboxItem::recalled) recalled(rank, item.process_set, item.ids);
      }
    }
  }
  void announce(size_t rank, int number, const OpSpec& spec) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Set& set = sets_[number];
    set.announced[spec.name].insert(rank);
    set.specs[spec.name] = spec;
    decide(number, spec.name);
  }
  void decide(int number, const std::string& name) {
    Set& set = sets_[number];
    std::set<size_t> ready = set.announced[name];
    if (number == 0) ready.insert(joined_.begin(), joined_.end());
    if (ready.size() < set.ranks.size()) return;
    set.announced.erase(name);
    TensorId id;
    if (!set.free.empty()) {
      id = set.free.back();
      set.free.pop_back();
    } else {
      id = set.next++;
    }
    const OpSpec& spec = set.specs[name];
    for_members(number, [&](Communicator& communicator) { communicator.apply_plan(name, id, &spec); });
    // Every so often an id is taken back at once; but once for a name, or a slow world would do nothing else.
    if (id % 7 == 3 && set.taken_back.insert(name).second) {
      set.answers[id].clear();
      for_members(number, [&](Communicator& communicator) {
        communicator.apply_errors({}, communicator.apply_recall_of_idle({id}));
      });
    }
  }
  void join(int rank, uint32_t round, bool without_zeros) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (round != joins_) return;  // said again, before it was known to be over
    if (std::find(joined_.begin(), joined_.end(), rank) == joined_.end()) joined_.push_back(rank);
    if (without_zeros) without_zeros_.insert(rank);
    const std::vector<int> joined = joined_;
    JoinPhase phase = joined.size() == engines_.size() ? JoinPhase::ending : JoinPhase::open;
    if (without_zeros_.size() == engines_.size()) {
      phase = JoinPhase::over;
      ++joins_;
      joined_.clear();
      without_zeros_.clear();
    }
    for_members(
        0, [&](Communicator& communicator) { communicator.apply_join(round, joined, phase, "Ranks have joined."); });
    if (phase != JoinPhase::open) return;
    std::vector<std::string> names;
    for (const auto& [name, ranks] : sets_[0].announced) names.push_back(name);
    for (const std::string& name : names) decide(0, name);
  }
  void recalled(size_t rank, int number, const std::vector<TensorId>& ids) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Set& set = sets_[number];
    for (TensorId id : ids) {
      set.answers[id].insert(rank);
      if (set.answers[id].size() == set.ranks.size()) {
        set.answers.erase(id);
        set.free.push_back(id);
      }
    }
  }
  template <typename Action>
  void for_members(int number, Action&& action) {
    for (int rank : sets_[number].ranks) {
      if (const auto communicator = engines_[rank]->communicator(number)) action(*communicator);
    }
  }

  std::vector<std::unique_ptr<Engine>>& engines_;
  std::mutex mutex_;  // guards everything below
  std::map<int, Set> sets_;
  uint32_t joins_ = 0;       // that are over
  std::vector<int> joined_;  // in this order
  std::set<int> without_zeros_;
  std::vector<std::thread> threads_;
};

// hosts: TCP, and memory between every other rank. shm: segments as between processes (memfd), mapped by each.
// sparse: TCP between partners only. sparse_hosts: the same, and memory between every third rank.
enum class Transport { in_process, tcp, hosts, shm, sparse, sparse_hosts };
constexpr bool is_sparse(Transport transport) {
  return transport == Transport::sparse || transport == Transport::sparse_hosts;
}
constexpr bool has_hosts(Transport transport) {
  return transport == Transport::hosts || transport == Transport::sparse_hosts;
}

std::vector<int> hosts_of(const std::vector<int>& ranks, Transport transport) {
  std::vector<int> hosts;
  for (const int rank : ranks) hosts.push_back(rank % (is_sparse(transport) ? 3 : 2));
  return hosts;
}

// Fills in how each member reaches the others.
template <typename Spec>
void connect_specs(const std::vector<Spec*>& specs, const std::vector<int>& ranks, Transport transport,
                   const Config& config) {
  std::vector<std::string> addresses;
  for (size_t i = 0; i < ranks.size(); ++i) {
    const bool sockets = transport == Transport::tcp || has_hosts(transport) || is_sparse(transport);
    for (size_t k = i + 1; sockets && k < ranks.size(); ++k) {
      int pair[2];
      CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0, "socketpair");
      specs[i]->sockets[ranks[k]].push_back(pair[0]);
      specs[k]->sockets[ranks[i]].push_back(pair[1]);
    }
    if (transport == Transport::tcp || transport == Transport::sparse) continue;
    Status status;
    specs[i]->segment = Segment::create(Engine::segment_bytes(config), transport != Transport::shm, status);
    CHECK(specs[i]->segment, "%s", status.message().c_str());
    addresses.push_back(specs[i]->segment->address());
  }
  for (Spec* spec : specs) {
    spec->segment_addresses = addresses;
    if (has_hosts(transport)) spec->hosts = hosts_of(ranks, transport);
  }
}

std::vector<std::unique_ptr<Engine>> make_world(int size, Transport transport, const Config& config) {
  std::vector<std::unique_ptr<Engine>> engines;
  std::vector<WorldSpec> specs(size);
  std::vector<WorldSpec*> all;
  std::vector<std::string> labels;
  std::vector<int> everyone;
  Status status;
  for (int rank = 0; rank < size; ++rank) {
    labels.push_back("rank " + std::to_string(rank) + " on host stress");
    everyone.push_back(rank);
    all.push_back(&specs[rank]);
  }
  for (int rank = 0; rank < size; ++rank) {
    specs[rank].rank = rank;
    specs[rank].epoch = 1;
    specs[rank].labels = labels;
  }
  connect_specs(all, everyone, transport, config);
  for (int rank = 0; rank < size; ++rank) {
    engines.push_back(Engine::create(std::move(specs[rank]), config, status));
    CHECK(engines.back(), "%s", status.message().c_str());
  }
  return engines;
}

// Operations with on_done. The mutex is held while one is started, and taken where it is told.
struct {
  std::mutex mutex;
  int started = 0, told = 0;
  int left = 0;  // of them, those that a thread had waited for
} g_told;

struct Pending {
  std::shared_ptr<Submission> submission;
  std::vector<float> data;
  std::vector<int64_t> integers;  // memory of int8 or int64
  int index;
};

// Averages of integers: each member has the largest one less its place, so that no sum fits the type.
DType integer_type(int index) { return index % 2 == 0 ? DType::int8 : DType::int64; }
bool scatters_integers(int index) { return index % 4 < 2; }

int64_t integer_at(DType dtype, const void* memory, int64_t at) {
  return dtype == DType::int8 ? static_cast<const int8_t*>(memory)[at] : static_cast<const int64_t*>(memory)[at];
}

void fill_integers(DType dtype, std::vector<int64_t>& memory, int length, int less) {
  memory.assign(static_cast<size_t>(length), std::numeric_limits<int64_t>::max() - less);
  if (dtype == DType::int8) std::memset(memory.data(), std::numeric_limits<int8_t>::max() - less, memory.size() * 8);
}

// Adasum of constant vectors, of which any two point the same way: that of two is their mean.
float means_by_tree(std::vector<float> values) {
  const size_t power = std::bit_floor(values.size());
  for (size_t i = power; i < values.size(); ++i) values[i - power] = (values[i - power] + values[i]) / 2;
  for (size_t count = power; count > 1; count /= 2) {
    for (size_t i = 0; i < count / 2; ++i) values[i] = (values[2 * i] + values[2 * i + 1]) / 2;
  }
  return values[0];
}

// One thread of one rank: `count` operations of its own name space, in random order, some waited for at once. All ranks
// compute the same expectations. Returns early (true) once the world was aborted.
//
// `ranks` are the members of process set `set`; values are rank + 1.
bool run_thread(Engine& engine, int rank, int set, const std::vector<int>& ranks, int thread, int count, uint64_t seed,
                bool may_abort) {
  const int size = static_cast<int>(ranks.size());
  float total = 0;
  std::vector<float> values;
  for (int member : ranks) {
    values.push_back(static_cast<float>(member + 1));
    total += values.back();
  }
  const float mean = means_by_tree(values);
  const int place = static_cast<int>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
  std::mt19937_64 shared(seed + thread);                  // equal on all ranks: what the operations are
  std::mt19937_64 own(seed * 31 + rank * 1000 + thread);  // differs: the order
  std::vector<int> lengths, kinds, roots;
  for (int i = 0; i < count; ++i) {
    lengths.push_back(static_cast<int>(shared() % 8 == 0 ? shared() % 60000 : shared() % 300));
    kinds.push_back(static_cast<int>(shared() % 7));
    roots.push_back(ranks[shared() % ranks.size()]);
  }
  std::vector<int> order(count);
  for (int i = 0; i < count; ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), own);

  std::vector<std::unique_ptr<Pending>> pending;
  const auto finish = [&](Pending& one) {
    while (!engine.wait(*one.submission, 100'000)) {
    }
    const Status& status = one.submission->status;
    if (!status.ok()) {
      CHECK(may_abort, "rank %d: %s", rank, status.message().c_str());
      return false;
    }
    const int i = one.index;
    if (kinds[i] == 0 || kinds[i] == 1) {  // allreduce of rank + 1
      for (float value : one.data) CHECK(value == total, "allreduce %d gave %f", i, value);
    } else if (kinds[i] == 2) {
      for (float value : one.data) CHECK(value == roots[i] + 1, "broadcast %d gave %f", i, value);
    } else if (kinds[i] == 3) {  // allgather of rank + length rows
      const OutputBuffer& output = one.submission->outputs[0];
      const float* at = reinterpret_cast<const float*>(output.data.get());
      for (int r : ranks) {
        for (int k = 0; k < lengths[i] + r; ++k, ++at) CHECK(*at == r + 1, "allgather %d gave %f", i, *at);
      }
    } else if (kinds[i] == 6) {
      const DType dtype = integer_type(i);
      const int64_t most =
          dtype == DType::int8 ? std::numeric_limits<int8_t>::max() : std::numeric_limits<int64_t>::max();
      const int64_t rows = scatters_integers(i) ? split_rows(lengths[i], size, place).count : lengths[i];
      const void* found = one.integers.data();
      if (scatters_integers(i)) {
        found = one.submission->outputs[0].data.get();
        CHECK(one.submission->outputs[0].shape[0] == rows, "rows of an average");
      }
      for (int64_t k = 0; k < rows; ++k) {
        const int64_t value = integer_at(dtype, found, k);
        CHECK(value == most - size / 2, "average %d gave %lld", i, static_cast<long long>(value));
      }
    } else if (kinds[i] == 5) {  // its weights are rounded
      for (float value : one.data) CHECK(std::abs(value - mean) < 1e-5f * mean, "Adasum %d gave %f", i, value);
    } else {
      const OutputBuffer& output = one.submission->outputs[0];
      const float* at = reinterpret_cast<const float*>(output.data.get());
      CHECK(output.shape[0] == split_rows(lengths[i], size, place).count, "reducescatter rows");
      for (int64_t k = 0; k < output.shape[0]; ++k) CHECK(at[k] == total, "reducescatter %d gave %f", i, at[k]);
    }
    return true;
  };

  for (int i : order) {
    auto one = std::make_unique<Pending>();
    one->index = i;
    const int length = kinds[i] == 3 ? lengths[i] + rank : lengths[i];
    one->data.assign(static_cast<size_t>(length), static_cast<float>(rank + 1));
    one->submission = std::make_shared<Submission>();
    OpSpec& spec = one->submission->spec;
    constexpr OpType types[] = {OpType::allreduce,     OpType::allreduce, OpType::broadcast, OpType::allgather,
                                OpType::reducescatter, OpType::allreduce, OpType::allreduce};
    spec.type = types[kinds[i]];
    if (kinds[i] == 6 && scatters_integers(i)) spec.type = OpType::reducescatter;
    if (kinds[i] == 5) spec.reduce_op = ReduceOp::adasum;
    spec.name = "thread" + std::to_string(thread) + ".op" + std::to_string(i);
    spec.process_set = set;
    spec.tensors = {{DType::float32, {length}}};
    spec.root = spec.type == OpType::broadcast ? roots[i] : 0;
    auto* memory = reinterpret_cast<std::byte*>(one->data.data());
    const bool in_place = spec.type == OpType::allreduce || spec.type == OpType::broadcast;
    if (kinds[i] == 6) {
      spec.reduce_op = ReduceOp::average;
      spec.tensors[0].dtype = integer_type(i);
      fill_integers(integer_type(i), one->integers, length, place);
      memory = reinterpret_cast<std::byte*>(one->integers.data());
    }
    one->submission->spans = {{memory, in_place ? memory : nullptr, length}};
    const bool tells = i % 3 == 0;
    const bool leaves = i % 9 == 1;  // waits for a moment, and then asks to be told
    const auto told = [](const std::shared_ptr<Submission>& done) {
      CHECK(done->state.load(std::memory_order_acquire) == Operation::done, "told too early");
      const std::lock_guard<std::mutex> lock(g_told.mutex);
      ++g_told.told;
    };
    if (tells) one->submission->on_done = told;
    Status status;
    {
      std::unique_lock<std::mutex> lock(g_told.mutex, std::defer_lock);
      if (tells) lock.lock();
      status = engine.start(one->submission, leaves ? Start::by_waiter : Start::gathered);
      if (tells && status.ok()) ++g_told.started;
    }
    if (leaves && status.ok() && !engine.wait(*one->submission, 50)) {
      const std::lock_guard<std::mutex> lock(g_told.mutex);
      if (engine.tell_when_done(one->submission, told)) {
        ++g_told.started;
        ++g_told.left;
      }
    }
    if (!status.ok()) {
      CHECK(may_abort, "rank %d: %s", rank, status.message().c_str());
      break;
    }
    pending.push_back(std::move(one));
    if (own() % 4 == 0 && pending.size() > 8) std::this_thread::yield();
  }
  bool alive = true;
  for (auto& one : pending) alive = finish(*one) && alive;
  return alive;
}

// Process sets come and go while everything else runs: each round, half of the ranks or more form one, use it, and take
// it away. Ranks keep in step with a barrier where a training process would use a collective.
void churn(std::vector<std::unique_ptr<Engine>>& engines, Negotiator& negotiator, Transport transport,
           const Config& config, int rounds, uint64_t seed, bool may_abort, std::vector<std::thread>& workers) {
  struct Round {
    std::vector<int> ranks;
    std::vector<ProcessSetSpec> specs;
  };
  struct Shared {
    std::vector<Round> rounds;
    std::barrier<> step;
    explicit Shared(std::ptrdiff_t size) : step(size) {}
  };
  const int size = static_cast<int>(engines.size());
  auto shared = std::make_shared<Shared>(size);
  std::mt19937_64 random(seed);
  for (int round = 0; round < rounds; ++round) {
    Round one;
    for (int rank = 0; rank < size; ++rank) {
      if (random() % 4 != 0) one.ranks.push_back(rank);
    }
    if (one.ranks.empty()) one.ranks.push_back(0);
    one.specs.resize(engines.size());
    for (int rank = 0; rank < size; ++rank) {
      one.specs[rank].number = round + 1;
      one.specs[rank].ranks = one.ranks;
    }
    std::vector<ProcessSetSpec*> members;
    for (const int rank : one.ranks) members.push_back(&one.specs[rank]);
    connect_specs(members, one.ranks, transport, config);
    negotiator.add_set(round + 1, one.ranks);
    shared->rounds.push_back(std::move(one));
  }
  for (int rank = 0; rank < size; ++rank) {
    workers.emplace_back([&engines, shared, rank, seed, may_abort] {
      for (Round& round : shared->rounds) {
        ProcessSetSpec& spec = round.specs[rank];
        const int number = spec.number;
        const bool member = std::find(round.ranks.begin(), round.ranks.end(), rank) != round.ranks.end();
        const Status status = engines[rank]->add_process_set(std::move(spec));
        CHECK(status.ok() || may_abort, "%s", status.message().c_str());
        shared->step.arrive_and_wait();
        if (member && status.ok()) run_thread(*engines[rank], rank, number, round.ranks, 90, 12, seed, may_abort);
        shared->step.arrive_and_wait();
        engines[rank]->remove_process_set(number);
      }
    });
  }
}

// Starts this rank's next allreduce that no thread waits for, unless its earlier one is still in flight.
void stand(Engine& engine, int rank, int size, std::unique_ptr<Pending>& standing, bool may_abort) {
  if (standing) {
    if (standing->submission->state.load(std::memory_order_acquire) != Operation::done) return;
    const Status& status = standing->submission->status;
    CHECK(status.ok() || may_abort, "rank %d: %s", rank, status.message().c_str());
    const auto least = static_cast<float>(rank + 1), most = static_cast<float>(size * (size + 1)) / 2;
    for (float value : standing->data) {
      CHECK(!status.ok() || (value >= least && value <= most), "what stood on rank %d gave %f", rank, value);
    }
  }
  standing = std::make_unique<Pending>();
  standing->data.assign(7, static_cast<float>(rank + 1));
  standing->submission = std::make_shared<Submission>();
  standing->submission->unawaited = true;
  OpSpec& spec = standing->submission->spec;
  spec.type = OpType::allreduce;
  spec.name = "joined.noname.stands";  // as a number of unnamed operations, which begin anew after a join
  spec.tensors = {{DType::float32, {7}}};
  auto* memory = reinterpret_cast<std::byte*>(standing->data.data());
  standing->submission->spans = {{memory, memory, 7}};
  if (const Status status = engine.start(standing->submission, Start::gathered); !status.ok()) {
    CHECK(may_abort, "rank %d: %s", rank, status.message().c_str());
    standing.reset();
  }
}

// Ranks run out of data at different steps; each step reduces a few tensors, some under names of their own. Checked is
// which ranks took part. Returns early once the world was aborted. standing: what may be in flight after the end.
void run_until_joined(Engine& engine, int rank, int size, uint64_t seed, bool may_abort,
                      std::unique_ptr<Pending>& standing) {
  std::mt19937_64 own(seed * 31 + static_cast<uint64_t>(rank));
  for (uint64_t round = 0; round < 4; ++round) {
    std::mt19937_64 shared(seed + round);
    std::vector<int> steps;
    for (int member = 0; member < size; ++member) steps.push_back(static_cast<int>(shared() % 12));
    for (int step = 0; step < steps[rank]; ++step) {
      if (own() % 3 == 0) stand(engine, rank, size, standing, may_abort);
      float total = 0;
      for (int member = 0; member < size; ++member) total += step < steps[member] ? static_cast<float>(member + 1) : 0;
      std::vector<Pending> tensors(3);
      bool alive = true;
      for (size_t i = 0; i < 3 && alive; ++i) {
        Pending& one = tensors[i];
        const int64_t length = i == 0 ? 5 : i == 1 ? 900 : 30'000;
        one.data.assign(static_cast<size_t>(length), static_cast<float>(rank + 1));
        one.submission = std::make_shared<Submission>();
        OpSpec& spec = one.submission->spec;
        spec.type = OpType::allreduce;
        spec.name = i == 1 ? "joined.noname"
                           : "joined." + std::to_string(i) + (step % 4 == 3 ? ".step" + std::to_string(step) : "");
        spec.tensors = {{DType::float32, {length}}};
        auto* memory = reinterpret_cast<std::byte*>(one.data.data());
        one.submission->spans = {{memory, memory, length}};
        if (const Status status = engine.start(one.submission, Start::gathered); !status.ok()) {
          CHECK(may_abort, "rank %d: %s", rank, status.message().c_str());
          tensors.resize(i);
          alive = false;
        }
      }
      for (Pending& one : tensors) {
        while (!engine.wait(*one.submission, 100'000)) {
        }
        if (!one.submission->status.ok()) {
          CHECK(may_abort, "rank %d: %s", rank, one.submission->status.message().c_str());
          continue;
        }
        for (float value : one.data) CHECK(value == total, "step %d gave %f, not %f", step, value, total);
      }
      if (!alive) return;
    }
    int64_t ticket = Communicator::kNoTicket;
    for (int last = -1; last < 0;) {
      if (const Status status = engine.communicator(0)->join(100'000, ticket, last); !status.ok()) {
        CHECK(may_abort, "rank %d: %s", rank, status.message().c_str());
        return;
      }
    }
  }
}

constexpr uint64_t kTransports = 6;
enum class Ending { orderly, abort, sudden_close };

void run_world(uint64_t seed, Transport transport) {
  std::mt19937_64 random(seed);
  const int size = 2 + static_cast<int>(random() % (is_sparse(transport) ? 7 : 3));
  const int threads = 1 + static_cast<int>(random() % 3);
  const int count = 20 + static_cast<int>(random() % 30);
  const auto ending = static_cast<Ending>(random() % 3);
  Config config;
  config.staging_buffer_bytes = 16384;
  if (is_sparse(transport)) config.full_mesh_members = 1;
  config.staging_buffer_count = 2 + static_cast<int>(random() % 3);
  config.spin_us = static_cast<int64_t>(random() % 60);
  if (random() % 3 == 0) config.fusion_threshold_bytes = random() % 100000;
  std::vector<std::unique_ptr<Pending>> standing(static_cast<size_t>(size));  // outlives the engines
  std::vector<std::unique_ptr<Engine>> engines = make_world(size, transport, config);
  const testing::TimelineFolder timeline;  // of half of the worlds over each transport
  const bool recorded = seed / kTransports % 2 == 0;
  if (recorded) CHECK_OK(engines[0]->timeline().start(timeline.path(), true, 0));
  {
    Negotiator negotiator(engines);
    std::vector<std::thread> workers;
    std::vector<int> everyone(size);
    std::iota(everyone.begin(), everyone.end(), 0);
    if (random() % 2 == 0) {
      churn(engines, negotiator, transport, config, 1 + static_cast<int>(random() % 4), seed, ending != Ending::orderly,
            workers);
    }
    for (int rank = 0; rank < size; ++rank) {
      for (int thread = 0; thread < threads; ++thread) {
        workers.emplace_back([&, rank, thread] {
          for (int step = 0; step < 3; ++step) {
            if (!run_thread(*engines[rank], rank, 0, everyone, thread, count, seed + 17, ending != Ending::orderly)) {
              return;
            }
          }
        });
      }
    }
    if (ending != Ending::orderly) {
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 20000));  // anywhere in the middle, on purpose
      Engine& victim = *engines[random() % size];
      if (ending == Ending::abort) {
        victim.abort("rank ? on host stress was told to abort.");
      } else {
        CHECK_OK(victim.close(""));
      }
    }
    for (std::thread& worker : workers) worker.join();
    if (ending == Ending::orderly) {
      const bool cut_short = random() % 3 == 0;
      std::vector<std::thread> joiners;
      for (int rank = 0; rank < size; ++rank) {
        joiners.emplace_back(
            [&, rank] { run_until_joined(*engines[rank], rank, size, seed, cut_short, standing[rank]); });
      }
      if (cut_short) {
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 20000));  // anywhere, on purpose
        CHECK_OK(engines[random() % size]->close(""));
      }
      for (std::thread& joiner : joiners) joiner.join();
    }
    std::vector<std::thread> closers;
    for (auto& engine : engines) closers.emplace_back([&] { CHECK_OK(engine->close("")); });
    for (std::thread& closer : closers) closer.join();
  }
  if (!recorded) return;
  bool running = false;
  CHECK_OK(engines[0]->timeline().stop(running));
  timeline.check();
}

}  // namespace

int main(int argc, char** argv) {
  const int worlds = argc > 1 ? std::atoi(argv[1]) : 50;
  const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  const std::string transport = argc > 3 ? argv[3] : "all";
  const std::vector<std::string> names = {"in_process", "tcp", "hosts", "shm", "sparse", "sparse_hosts"};
  for (int i = 0; i < worlds; ++i) {
    const std::string& name = transport == "all" ? names[i % names.size()] : transport;
    const auto found = std::find(names.begin(), names.end(), name);
    CHECK(found != names.end(), "there is no transport %s", name.c_str());
    run_world(seed + i, static_cast<Transport>(found - names.begin()));
    CHECK(g_told.told == g_told.started, "%d of %d operations were told to be done", g_told.told, g_told.started);
  }
  CHECK(worlds < static_cast<int>(kTransports) || g_told.left > 0,
        "no operation was left to the engine after a vain wait");
  std::printf("engine_stress: %d worlds, seed %llu, %s: ok\n", worlds, static_cast<unsigned long long>(seed),
              transport.c_str());
  return 0;
}
