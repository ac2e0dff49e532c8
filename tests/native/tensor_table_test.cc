// The tensor table and join without threads, logs or peers: what they ask their caller to do, as examples and over
// random sequences against a model of the order log and the coordinator.
#include "engine/tensor_table.h"

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "base/limits.h"
#include "check.h"
#include "engine/join.h"
#include "named_tests.h"

using namespace horovod;
using namespace horovod::testing;

namespace {

// An effect as a line: "arrive 3 x", "announce x", "complete x", "complete x: why".
std::string line(const Effect& effect) {
  static const char* const kVerbs[] = {"arrive",   "withdraw",    "announce", "tell_blocked",
                                       "recalled", "tell_joined", "complete"};
  std::string text = kVerbs[effect.kind];
  if (effect.kind == Effect::arrive || effect.kind == Effect::withdraw) text += " " + std::to_string(effect.id);
  if (effect.submission) text += " " + effect.submission->announced_name();
  if (effect.submission && effect.submission->zeros) text += " (zeros)";
  for (const TensorId id : effect.ids) text += " " + std::to_string(id);
  if (effect.kind == Effect::tell_joined) text += effect.without_zeros ? " without zeros" : "";
  if (effect.done) text += " " + effect.done->announced_name();
  if (effect.done && !effect.done->status.ok()) text += ": " + effect.done->status.message();
  return text;
}

struct World {
  TensorTable table{0};
  Join join{table, 1, [this](Submission&) { return ++zeros_made <= zeros_allowed; }};
  Effects effects;
  int zeros_made = 0;
  int zeros_allowed = 1000;

  std::shared_ptr<Submission> submit(const std::string& name, int64_t rows = 1, OpType type = OpType::allreduce) {
    const auto submission = std::make_shared<Submission>();
    submission->spec = spec(name, rows, type);
    CHECK(table.submit(submission, effects), "%s is in flight", name.c_str());
    return submission;
  }
  static OpSpec spec(const std::string& name, int64_t rows = 1, OpType type = OpType::allreduce) {
    OpSpec made;
    made.type = type;
    made.name = name;
    made.tensors = {{DType::float32, {rows}}};
    return made;
  }
  void run(TensorId id) {
    Submission* const submission = table.arrived(id);
    CHECK(submission, "nothing has arrived under %u", id);
    submission->zeros ? join.settled(*submission, effects) : table.ran(*submission, effects);
  }
  void withdrawn(TensorId id) {
    Submission* const submission = table.arrived(id);
    CHECK(submission, "nothing has arrived under %u", id);
    submission->zeros ? join.settled(*submission, effects) : table.withdrawn(*submission, effects);
  }
  // A name that has run once, so that it has the id.
  void learn(const std::string& name, TensorId id, int64_t rows = 1) {
    const auto submission = submit(name, rows);
    CHECK(table.plan(submission->announced_name(), id, effects));
    run(id);
    effects.clear();
  }
  void expect(const std::vector<std::string>& wanted) {
    std::vector<std::string> found;
    for (const Effect& effect : effects) found.push_back(line(effect));
    std::string text;
    for (const std::string& one : found) text += one + "\n";
    CHECK(found == wanted, "the effects are\n%s", text.c_str());
    effects.clear();
  }
};

void a_plan_after_the_submission_and_before_it() {
  World world;
  world.submit("x");
  world.expect({"announce x"});
  CHECK(world.table.plan("x", 3, world.effects));
  world.expect({"arrive 3 x"});
  CHECK(!world.table.plan("x", 4, world.effects));  // nothing is announced as x
  world.run(3);
  world.expect({"complete x"});
  CHECK(!world.table.arrived(3));
  world.submit("x");
  world.expect({"arrive 3 x"});
}

void one_of_a_name_at_a_time() {
  World world;
  world.submit("x");
  const auto second = std::make_shared<Submission>();
  second->spec = World::spec("x", 2);  // another signature, the same name
  CHECK(!world.table.submit(second, world.effects));
  world.expect({"announce x"});
  CHECK(world.table.in_flight().size() == 1 && world.table.known() == 1);
}

void a_recall_while_something_has_arrived() {
  World world;
  world.learn("x", 3);
  world.learn("y", 4);
  world.submit("x");
  world.expect({"arrive 3 x"});
  world.table.recall({3, 4, 9}, world.effects);
  world.expect({"withdraw 3"});
  world.table.recall({3}, world.effects);  // told again
  world.expect({});
  CHECK(world.table.known() == 1);  // y has neither an id nor an operation
  world.withdrawn(3);
  world.expect({"recalled 4 9 3", "announce x"});
}

void a_withdrawal_that_a_batch_answers() {
  World world;
  world.learn("x", 3);
  world.submit("x");
  world.table.recall({3}, world.effects);
  world.run(3);
  world.expect({"arrive 3 x", "withdraw 3", "recalled 3", "complete x"});
  CHECK(world.table.known() == 0);
}

void an_error_of_what_has_an_id() {
  World world;
  world.learn("x", 3);
  world.submit("x");
  world.table.refuse("x", {Code::precondition, "no"}, world.effects);
  world.table.refuse("x", {Code::precondition, "no again"}, world.effects);
  world.expect({"arrive 3 x", "withdraw 3"});
  world.withdrawn(3);
  world.expect({"complete x: no"});
  world.submit("x");
  world.expect({"arrive 3 x"});  // it keeps its id
}

void a_recall_after_an_error_waits_for_the_withdrawal() {
  World world;
  world.learn("x", 3);
  world.submit("x");
  world.table.refuse("x", {Code::precondition, "no"}, world.effects);
  world.table.recall({3}, world.effects);
  world.expect({"arrive 3 x", "withdraw 3"});
  world.withdrawn(3);
  world.expect({"recalled 3", "complete x: no"});
}

void an_error_after_a_recall_is_not_lost() {
  World world;
  world.learn("x", 3);
  world.submit("x");
  world.table.recall({3}, world.effects);
  world.table.refuse("x", {Code::precondition, "no"}, world.effects);
  world.expect({"arrive 3 x", "withdraw 3"});
  world.withdrawn(3);
  world.expect({"recalled 3", "complete x: no"});
}

void an_error_of_what_is_announced() {
  World world;
  world.submit("x");
  world.table.refuse("x", {Code::precondition, "no"}, world.effects);
  world.expect({"announce x", "complete x: no"});
  CHECK(world.table.known() == 0);
}

void unnamed_operations_overlap_in_lanes() {
  World world;
  const auto lanes = static_cast<int>(LaneTable::kUnnamedLanes);
  for (int i = 0; i < lanes; ++i) world.submit("op.noname");
  CHECK(world.effects.size() == LaneTable::kUnnamedLanes &&
        world.effects[5].submission->announced_name() == "op.noname.5");
  world.effects.clear();
  world.submit("op.noname");  // waits for the first
  world.expect({});
  world.table.plan("op.noname.0", 7, world.effects);
  world.run(7);
  world.expect({"arrive 7 op.noname.0", "complete op.noname.0", "arrive 7 op.noname." + std::to_string(lanes)});
}

void room_for_signatures() {
  World world;
  const auto most = static_cast<int64_t>(LaneTable::kUnnamedVariants);
  world.submit("op.noname", 1);
  world.table.plan("op.noname.0", 7, world.effects);
  for (int64_t rows = 2; rows <= most; ++rows) world.submit("op.noname", rows);
  CHECK(world.table.known() == LaneTable::kUnnamedVariants);
  world.submit("op.noname", most + 1);  // the first one's lane is in use, so it is kept
  CHECK(world.table.known() == LaneTable::kUnnamedVariants + 1);
  world.effects.clear();
  world.run(7);
  world.table.recall({7}, world.effects);
  world.expect({"complete op.noname.0", "recalled 7"});
  CHECK(world.table.known() == LaneTable::kUnnamedVariants);
}

void what_is_in_flight_for_long_is_told_now_and_then() {
  World world;
  world.submit("x");  // nobody waits for it
  world.effects.clear();
  constexpr int64_t kSeenUs = 10'000'000;
  world.table.watch(kSeenUs, world.effects);
  world.table.watch(kSeenUs + limits::kBlockedAfterUs, world.effects);
  world.expect({});
  const int64_t told_us = kSeenUs + limits::kBlockedAfterUs + 1;
  world.table.watch(told_us, world.effects);
  world.table.watch(told_us + limits::kBlockedAgainUs, world.effects);
  world.expect({"tell_blocked x"});
  world.table.watch(told_us + limits::kBlockedAgainUs + 1, world.effects);
  world.expect({"tell_blocked x"});
}

void of_much_that_is_in_flight_the_oldest_is_told_and_what_a_thread_waits_for() {
  World world;
  std::vector<std::shared_ptr<Submission>> all;
  std::vector<std::string> told;
  for (size_t i = 0; i < 3 * limits::kMostTold; ++i) {
    const std::string name = "x" + std::to_string(i);
    all.push_back(world.submit(name));
    all.back()->number = i;
    if (i < limits::kMostTold) told.push_back("tell_blocked " + name);
  }
  all.back()->waited_since_us = 1;
  told.push_back("tell_blocked " + all.back()->spec.name);
  world.effects.clear();
  constexpr int64_t kSeenUs = 10'000'000;
  world.table.watch(kSeenUs, world.effects);
  for (int round = 0; round < 3; ++round) {
    world.table.watch(kSeenUs + limits::kBlockedAfterUs + 1 + round * limits::kWatchUs, world.effects);
  }
  world.expect(told);
}

void what_runs_or_is_withdrawn_is_not_held() {
  World world;
  world.learn("x", 3);
  world.learn("y", 4);
  const auto x = world.submit("x");
  world.submit("y");
  std::vector<Unfinished> held;
  CHECK(world.table.unfinished(held) && held.size() == 2);
  x->running = true;
  held.clear();
  CHECK(world.table.unfinished(held) && held.size() == 1 && held[0].name == "y" && !held[0].awaited);
  world.table.recall({4}, world.effects);
  CHECK(!world.table.unfinished(held));
}

void a_close_in_the_middle() {
  World world;
  world.learn("x", 3);
  world.submit("x");
  world.submit("y");
  world.effects.clear();
  world.table.close({Code::aborted, "over"}, world.effects);
  world.expect({"complete y: over", "withdraw 3"});
  world.run(3);  // it was agreed before
  world.expect({"complete x"});
  CHECK(world.table.in_flight().empty());
}

void an_end_completes_everything() {
  World world;
  world.learn("x", 3);
  const auto x = world.submit("x");
  world.submit("y");
  world.effects.clear();
  world.table.end(world.effects);
  CHECK(world.effects.size() == 2 && world.table.in_flight().empty() && !world.table.arrived(3));
  world.effects.clear();
  world.table.recall({3}, world.effects);
  world.expect({"recalled 3"});
}

void a_member_that_joins_gives_zeros() {
  World world;
  world.learn("x", 3);
  world.join.begin(world.effects);
  world.expect({"tell_joined"});
  CHECK(!world.join.refusal(World::spec("x")).ok());
  world.join.apply({1}, JoinPhase::open, "Rank 1 has joined.", world.effects);
  world.expect({"arrive 3 x (zeros)"});
  world.run(3);
  world.expect({"arrive 3 x (zeros)"});  // again, ahead of the others
  world.join.plan(4, World::spec("y"), world.effects);
  world.expect({"arrive 4 y (zeros)"});
  world.join.plan(5, World::spec("z", 1, OpType::allgather), world.effects);
  world.expect({});  // the others' operations are refused by them
  world.join.apply({1, 0}, JoinPhase::ending, "", world.effects);
  CHECK(world.effects.size() == 2);
  world.effects.clear();
  world.withdrawn(3);
  world.expect({});
  world.run(4);  // agreed before it was withdrawn
  world.expect({"tell_joined without zeros"});
  world.join.apply({1, 0}, JoinPhase::over, "", world.effects);
  world.expect({});
  CHECK(world.join.round() == 1 && world.join.last_rank() == 0 && world.join.refusal(World::spec("x")).ok());
  world.submit("x");
  world.expect({"arrive 3 x"});
}

void the_next_id_waits_for_the_zeros_under_the_earlier_one() {
  World world;
  world.learn("x", 3);
  world.join.begin(world.effects);
  world.join.apply({1}, JoinPhase::open, "Rank 1 has joined.", world.effects);
  world.effects.clear();
  world.join.recall({3}, world.effects);
  world.join.plan(4, World::spec("x"), world.effects);
  world.expect({"withdraw 3"});
  world.withdrawn(3);
  world.expect({"recalled 3", "arrive 4 x (zeros)"});
  world.join.recall({4}, world.effects);
  world.join.plan(5, World::spec("x"), world.effects);
  world.join.recall({5}, world.effects);  // before it was in use
  world.withdrawn(4);
  world.expect({"withdraw 4", "recalled 5 4"});
  CHECK(world.table.known() == 0 && world.table.in_flight().empty());
}

void zeros_without_memory() {
  World world;
  world.learn("x", 3);
  world.zeros_allowed = 0;
  world.join.begin(world.effects);
  world.join.apply({1}, JoinPhase::open, "Rank 1 has joined.", world.effects);
  world.expect({"tell_joined"});
  CHECK(world.table.in_flight().empty());
}

void others_have_joined() {
  World world;
  const auto gather = world.submit("g", 1, OpType::allgather);
  world.table.plan("g", 3, world.effects);
  world.submit("x");
  world.effects.clear();
  world.join.apply({0}, JoinPhase::open, "Rank 0 has joined.", world.effects);
  world.expect({"withdraw 3"});
  world.withdrawn(3);
  CHECK(world.effects.size() == 1 && ends_with(gather->status, error_code::not_with_join, "Allgather"));
  CHECK(world.join.refusal(World::spec("x")).ok() && !world.join.refusal(gather->spec).ok());
}

void unnamed_operations_begin_anew_after_a_join() {
  World world;
  world.submit("op.noname");
  world.table.plan("op.noname.0", 3, world.effects);
  world.run(3);
  world.join.begin(world.effects);
  world.join.apply({1, 0}, JoinPhase::over, "", world.effects);
  world.effects.clear();
  CHECK(world.table.known() == 0);
  world.join.recall({3}, world.effects);
  world.submit("op.noname");
  world.expect({"recalled 3", "announce op.noname.0"});
}

void what_stands_when_all_have_joined_stays() {
  for (const std::string name : {"allreduce.noname.0.0.question", "allreduce.allreduce.noname.0.0.question"}) {
    World world;
    const auto standing = world.submit(name);
    standing->unawaited = true;
    world.table.plan(name, 3, world.effects);
    world.join.begin(world.effects);
    world.join.apply({1, 0}, JoinPhase::over, "", world.effects);
    world.effects.clear();
    world.join.recall({3}, world.effects);  // the coordinator may count the name among the unnamed ones
    world.expect({"withdraw 3"});
    world.withdrawn(3);
    world.expect({"recalled 3", "announce " + name});
    world.table.plan(name, 4, world.effects);
    world.run(4);
    world.expect({"arrive 4 " + name, "complete " + name});
    CHECK(standing->lane->users == 0);
  }
}

void names_that_hold_numbers_of_unnamed_operations_are_names() {
  World world;
  world.learn("allreduce.allreduce.noname.0.0", 3);  // a gradient of an optimizer without names
  world.join.begin(world.effects);
  world.join.apply({1, 0}, JoinPhase::over, "", world.effects);
  world.effects.clear();
  world.submit("allreduce.allreduce.noname.0.0");
  world.expect({"arrive 3 allreduce.allreduce.noname.0.0"});
}

// What a log and a coordinator may see, whatever comes in which order: an id is not arrived at twice, nothing arrives
// under an id that is free, each recall is answered once and only when nothing is arrived under its ids, each operation
// completes once, and what is known stays bounded.
class Model {
 public:
  explicit Model(uint32_t seed) : random_(seed) {}

  void run(int steps) {
    for (int i = 0; i < steps; ++i) {
      step();
      follow();
    }
    world_.table.close({Code::aborted, "closed"}, world_.effects);
    world_.join.close();
    follow();
    while (!arrived_.empty()) {
      answer(*arrived_.begin());
      follow();
    }
    CHECK(live_ == 0 && world_.table.in_flight().empty() && owed_.empty(), "%d operations, %zu ids", live_,
          owed_.size());
  }

 private:
  size_t pick(size_t count) { return std::uniform_int_distribution<size_t>(0, count - 1)(random_); }
  template <class Set>
  auto any(const Set& set) {
    return *std::next(set.begin(), static_cast<ptrdiff_t>(pick(set.size())));
  }

  void step() {
    switch (pick(9)) {
      case 0:
      case 1:
      case 2:
        submit();
        break;
      case 3:
      case 4:
        if (!announced_.empty()) plan(any(announced_));
        break;
      case 5:
      case 6:
        if (!arrived_.empty()) answer(any(arrived_));
        break;
      case 7:
        recall();
        break;
      case 8:
        pick(3) == 0 ? change_round() : refuse();
        break;
    }
  }
  void submit() {
    const std::string name = pick(2) ? "n" + std::to_string(pick(6)) : "op.noname";
    const OpSpec spec = World::spec(name, static_cast<int64_t>(1 + pick(3)));
    if (!world_.join.refusal(spec).ok()) return;
    const auto submission = std::make_shared<Submission>();
    submission->spec = spec;
    if (world_.table.submit(submission, world_.effects)) ++live_;
  }
  void plan(const std::string& name) {
    announced_.erase(name);
    CHECK(world_.table.plan(name, fresh(), world_.effects));
  }
  TensorId fresh() {
    TensorId id = 0;
    while (planned_.count(id)) ++id;
    planned_.insert(id);
    return id;
  }
  // The log: the batch runs, or the withdrawal is granted.
  void answer(TensorId id) {
    arrived_.erase(id);
    if (withdrawing_.erase(id) > 0 && pick(2)) {
      world_.withdrawn(id);
    } else {
      world_.table.arrived(id)->running = true;
      world_.run(id);
    }
  }
  void recall() {
    if (!owed_.empty() || planned_.empty()) return;
    std::vector<TensorId> ids;
    for (const TensorId id : planned_) {
      if (pick(3) == 0) ids.push_back(id);
    }
    owed_.insert(ids.begin(), ids.end());
    world_.join.recall(ids, world_.effects);
    if (pick(4) == 0) follow(), world_.join.recall({owed_.begin(), owed_.end()}, world_.effects);  // told again
  }
  void refuse() {
    const std::string name = "n" + std::to_string(pick(6));
    announced_.erase(name);
    world_.table.refuse(name, {Code::precondition, "refused"}, world_.effects);
  }
  void change_round() {
    if (!world_.join.joined()) {
      if (world_.table.in_flight().empty()) world_.join.begin(world_.effects);
    } else if (!contributes_) {
      contributes_ = true;
      world_.join.apply({1}, JoinPhase::open, "Rank 1 has joined.", world_.effects);
    } else if (!ending_ && pick(2)) {
      world_.join.plan(fresh(), World::spec("n" + std::to_string(pick(6)), static_cast<int64_t>(1 + pick(3))),
                       world_.effects);
    } else if (!ending_) {
      ending_ = true;
      world_.join.apply({1, 0}, JoinPhase::ending, "", world_.effects);
    } else if (without_zeros_) {
      CHECK(arrived_.empty());
      contributes_ = ending_ = without_zeros_ = false;
      world_.join.apply({1, 0}, JoinPhase::over, "", world_.effects);
    }
  }

  void follow() {
    for (const Effect& effect : world_.effects) {
      switch (effect.kind) {
        case Effect::arrive:
          CHECK(planned_.count(effect.id) && arrived_.insert(effect.id).second, "%s", line(effect).c_str());
          CHECK(world_.table.arrived(effect.id) == effect.submission);
          break;
        case Effect::withdraw:
          CHECK(arrived_.count(effect.id) && withdrawing_.insert(effect.id).second, "%s", line(effect).c_str());
          break;
        case Effect::announce:
          CHECK(announced_.insert(effect.submission->announced_name()).second, "%s", line(effect).c_str());
          break;
        case Effect::recalled:
          for (const TensorId id : effect.ids) {
            // Told again while it is answered, an id may be answered again.
            CHECK(!arrived_.count(id), "%s", line(effect).c_str());
            owed_.erase(id);
            planned_.erase(id);
          }
          break;
        case Effect::tell_joined:
          without_zeros_ = effect.without_zeros;
          break;
        case Effect::tell_blocked:
          break;
        case Effect::complete:
          --live_;
          CHECK(!effect.done->zeros && effect.done->lane, "%s", line(effect).c_str());
          break;
      }
    }
    world_.effects.clear();
    CHECK(world_.table.known() <= 2 * planned_.size() + static_cast<size_t>(live_) + 3 * LaneTable::kUnnamedLanes);
  }

  std::mt19937 random_;
  World world_;
  int live_ = 0;
  std::set<std::string> announced_;
  std::set<TensorId> planned_, arrived_, withdrawing_, owed_;
  bool contributes_ = false, ending_ = false, without_zeros_ = false;
};

void random_sequences() {
  for (uint32_t seed = 0; seed < 300; ++seed) Model(seed).run(400);
}

}  // namespace

int main(int argc, char** argv) {
  static constexpr NamedTest kTests[] = {
      {"a plan after the submission and before it", a_plan_after_the_submission_and_before_it},
      {"one of a name at a time", one_of_a_name_at_a_time},
      {"a recall while something has arrived", a_recall_while_something_has_arrived},
      {"a withdrawal that a batch answers", a_withdrawal_that_a_batch_answers},
      {"an error of what has an id", an_error_of_what_has_an_id},
      {"a recall after an error waits for the withdrawal", a_recall_after_an_error_waits_for_the_withdrawal},
      {"an error after a recall is not lost", an_error_after_a_recall_is_not_lost},
      {"an error of what is announced", an_error_of_what_is_announced},
      {"unnamed operations overlap in lanes", unnamed_operations_overlap_in_lanes},
      {"room for signatures", room_for_signatures},
      {"what is in flight for long is told now and then", what_is_in_flight_for_long_is_told_now_and_then},
      {"of much that is in flight the oldest is told, and what a thread waits for",
       of_much_that_is_in_flight_the_oldest_is_told_and_what_a_thread_waits_for},
      {"what runs or is withdrawn is not held", what_runs_or_is_withdrawn_is_not_held},
      {"a close in the middle", a_close_in_the_middle},
      {"an end completes everything", an_end_completes_everything},
      {"a member that joins gives zeros", a_member_that_joins_gives_zeros},
      {"the next id waits for the zeros under the earlier one", the_next_id_waits_for_the_zeros_under_the_earlier_one},
      {"zeros without memory", zeros_without_memory},
      {"others have joined", others_have_joined},
      {"unnamed operations begin anew after a join", unnamed_operations_begin_anew_after_a_join},
      {"what stands when all have joined stays", what_stands_when_all_have_joined_stays},
      {"names that hold numbers of unnamed operations are names",
       names_that_hold_numbers_of_unnamed_operations_are_names},
      {"random sequences", random_sequences},
  };
  return run_named(argc, argv, kTests);
}
