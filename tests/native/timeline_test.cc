// The timeline without an engine: what events become, what happens where some are missing, and hooks of many threads
// while files begin and end.
#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "engine/timeline.h"
#include "named_tests.h"
#include "stuck_thread.h"
#include "timeline_folder.h"

namespace horovod {
namespace {

TimelineEvent event(TimelineEvent::Kind kind, int64_t time_us, uint64_t operation) {
  TimelineEvent made;
  made.kind = kind;
  made.time_us = time_us;
  made.operation = operation;
  return made;
}

TimelineEvent arrival(TimelineEvent::Kind kind, int64_t time_us, int rank) {
  TimelineEvent made = event(kind, time_us, 0);
  made.id = 7;
  made.rank = rank;
  return made;
}

TimelineEvent begun(int64_t time_us, uint64_t operation, const std::string& name) {
  TimelineEvent made = event(TimelineEvent::begun, time_us, operation);
  made.id = 7;
  made.text = name;
  made.tensors = {{DType::float32, {2, 3}}};
  return made;
}

TimelineEvent running(int64_t time_us, uint64_t operation) {
  TimelineEvent made = event(TimelineEvent::running, time_us, operation);
  made.plane = "TCP";
  return made;
}

void an_operation_from_its_first_arrival_to_its_end() {
  TimelineTrace trace(1000, 5);
  CHECK(trace.take() ==
        R"({"name":"process_name","ph":"M","pid":0,"args":{"name":"Horovod","start_time_since_epoch_in_micros":5}},)"
        "\n"
        R"({"name":"process_sort_index","ph":"M","pid":0,"args":{"sort_index":0}})");
  trace.add(arrival(TimelineEvent::arrived, 1005, 2));  // takes that back, so it does not count
  trace.add(arrival(TimelineEvent::withdrawn, 1006, 2));
  trace.add(arrival(TimelineEvent::arrived, 1010, 1));
  trace.add(begun(1020, 1, "x\"\t"));
  trace.add(arrival(TimelineEvent::arrived, 1021, 0));
  trace.add(arrival(TimelineEvent::arrived, 1030, 2));
  trace.add(arrival(TimelineEvent::agreed, 1030, 2));
  trace.add(arrival(TimelineEvent::arrived, 1035, 1));  // the next run of the id
  trace.add(running(1040, 1));
  trace.add(event(TimelineEvent::ended, 1050, 1));
  const std::string text = trace.take();
  const std::string expected = R"(,
{"name":"process_name","ph":"M","pid":1,"args":{"name":"x\"\u0009"}},
{"name":"process_sort_index","ph":"M","pid":1,"args":{"sort_index":1}},
{"ph":"B","name":"NEGOTIATE_ALLREDUCE","ts":10,"pid":1},
{"ph":"X","name":"1","ts":10,"pid":1,"dur":0},
{"ph":"X","name":"0","ts":21,"pid":1,"dur":0},
{"ph":"X","name":"2","ts":30,"pid":1,"dur":0},
{"ph":"E","name":"NEGOTIATE_ALLREDUCE","ts":30.001,"pid":1},
{"ph":"B","name":"ALLREDUCE","ts":30.001,"pid":1},
{"ph":"B","name":"QUEUE","ts":30.001,"pid":1},
{"ph":"E","name":"QUEUE","ts":40,"pid":1},
{"ph":"B","name":"TCP_ALLREDUCE","ts":40,"pid":1},
{"ph":"E","name":"TCP_ALLREDUCE","ts":50,"pid":1},
{"ph":"E","name":"ALLREDUCE","ts":50,"pid":1,"args":{"dtype":"float32","shape":"[2, 3]"}})";
  CHECK(text == expected, "%s", text.c_str());
  trace.add(begun(1060, 2, "x\"\t"));  // in the process that is there, where spans do not overlap
  CHECK(trace.take() ==
        ",\n"
        R"({"ph":"B","name":"NEGOTIATE_ALLREDUCE","ts":50,"pid":1})"
        ",\n"
        R"({"ph":"X","name":"1","ts":50,"pid":1,"dur":0})");
}

void where_events_are_missing_everything_ends_and_is_told() {
  TimelineTrace trace(0, 0);
  trace.add(begun(1, 1, "x"));
  trace.add(running(2, 1));
  trace.take();
  trace.gap(3, 5);
  CHECK(testing::contains(trace.take(), R"({"ph":"E","name":"ALLREDUCE","ts":5,"pid":1,)"));
  trace.add(event(TimelineEvent::ended, 6, 1));  // of an operation that has been ended
  trace.add(running(7, 99));                     // of one whose beginning is missing
  CHECK(trace.take().empty());
  trace.add(begun(8, 2, "x"));
  trace.finish(9);
  const std::string text = trace.take();
  CHECK(testing::contains(text, "not over when the timeline was stopped"));
  CHECK(testing::contains(text, R"("name":"EVENTS_DROPPED","ts":9,"pid":0,"s":"g","args":{"count":3}})"));
}

void hooks_of_many_threads_while_files_begin_and_end() {
  const testing::TimelineFolder folder;
  const std::string path = folder.path();
  Timeline timeline;
  std::atomic<bool> over{false};
  std::vector<std::thread> threads;
  for (int number = 0; number < 3; ++number) {
    threads.emplace_back([&, number] {
      while (!over.load()) {
        Operation operation;
        operation.spec.name = "x" + std::to_string(number);
        operation.spec.tensors = {{DType::float32, {1}}};
        if (timeline.active()) timeline.began_alone(operation, {}, {0});
        if (operation.traced) timeline.ended(operation, {});
      }
    });
  }
  for (int round = 0; round < 10; ++round) {
    CHECK_OK(timeline.start(path, true, 0));
    if (round % 3 == 0) std::this_thread::yield();
    bool running = false;
    (void)timeline.stop(running);  // it may have fallen behind, and then says so
    CHECK(running);
    folder.check();
  }
  CHECK_OK(timeline.start(path, false, 0));
  (void)timeline.start(path, false, 0);  // completes the first
  CHECK(timeline.start(path + "/x", false, 0).code() == Code::invalid_argument);
  CHECK(timeline.active());
  over.store(true);
  for (std::thread& thread : threads) thread.join();
  bool running = false;
  (void)timeline.stop(running);
  CHECK(running);
  folder.check();
  (void)timeline.stop(running);
  CHECK(!running);
}

// Waits as often as a busy machine needs.
Status stopped(Timeline& timeline) {
  bool running = false;
  for (;;) {
    Status status = timeline.stop(running);
    if (status.code() != Code::timeout) return status;
  }
}

// A file system that does not answer holds the thread that writes, but not the program.
void a_writer_that_is_stuck() {
  const testing::TimelineFolder folder;
  Timeline timeline(50'000);
  CHECK_OK(timeline.start(folder.path(), false, 0));
  bool running = false;
  {
    testing::StuckThread writer(testing::thread_named("hvd-timeline"));
    const Status late = timeline.stop(running);
    CHECK(running && late.code() == Code::timeout);
    CHECK(testing::ends_with(late, error_code::timeline, folder.path(), "50 ms"));
    CHECK(!timeline.active());
    CHECK(timeline.start(folder.path() + "2", false, 0).message() == late.message());
    CHECK(!timeline.active());
    ::unlink((folder.path() + "2").c_str());
  }
  CHECK_OK(stopped(timeline));
  folder.check();
  CHECK_OK(timeline.start(folder.path(), false, 0));
  CHECK_OK(stopped(timeline));
  folder.check();
}

void a_writer_that_outlives_the_timeline() {
  const testing::TimelineFolder folder;
  std::optional<testing::StuckThread> writer;
  {
    Timeline timeline(50'000);
    CHECK_OK(timeline.start(folder.path(), false, 0));
    writer.emplace(testing::thread_named("hvd-timeline"));
  }
  writer->let_go();
  while (testing::has_thread("hvd-timeline")) std::this_thread::yield();
  folder.check();
}

// There is room for the beginning of what is appended only; the array stays as it was.
void a_disk_that_is_full() {
  const testing::TimelineFolder folder;
  const int descriptor = ::open(folder.path().c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
  CHECK(descriptor >= 0);
  TimelineFile file(descriptor, folder.path());
  CHECK_OK(file.append("{}"));
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  CHECK(::getrlimit(RLIMIT_FSIZE, &before) == 0);
  for (const rlim_t room : {7, 8, 9, 10, 20}) {
    const rlimit small{room, before.rlim_max};
    CHECK(::setrlimit(RLIMIT_FSIZE, &small) == 0);
    const Status full = file.append(",\n{\"name\":\"something longer\"}");
    CHECK(full.code() == Code::internal);
    CHECK(testing::ends_with(full, error_code::timeline, folder.path(), "File too large. "));
    folder.check();
  }
  CHECK(::setrlimit(RLIMIT_FSIZE, &before) == 0);
  CHECK_OK(file.append(",\n{}"));  // there is room again
  folder.check();
  ::close(descriptor);
}

constexpr testing::NamedTest kTests[] = {
    {"an_operation_from_its_first_arrival_to_its_end", an_operation_from_its_first_arrival_to_its_end},
    {"where_events_are_missing_everything_ends_and_is_told", where_events_are_missing_everything_ends_and_is_told},
    {"hooks_of_many_threads_while_files_begin_and_end", hooks_of_many_threads_while_files_begin_and_end},
    {"a_writer_that_is_stuck", a_writer_that_is_stuck},
    {"a_writer_that_outlives_the_timeline", a_writer_that_outlives_the_timeline},
    {"a_disk_that_is_full", a_disk_that_is_full},
};

}  // namespace
}  // namespace horovod

int main(int argc, char** argv) { return horovod::testing::run_named(argc, argv, horovod::kTests); }
