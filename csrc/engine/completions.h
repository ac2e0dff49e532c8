// Tells callers that their operations are done.
//
// Operations complete under a communicator's lock, on whichever thread drives or ends the epoch. What a caller wants to
// do then is not known: it may submit the next operation, which takes that lock, or take a lock of its own under which
// another thread submits. So nothing of a caller's runs there. The operation is put into a queue, and one thread of the
// engine, which holds no lock, calls Submission::on_done of one after the other.
#pragma once

#include <memory>
#include <mutex>
#include <thread>

namespace horovod {

struct Submission;

class Completions {
 public:
  Completions();
  // Calls what is left and ends the thread. On that thread itself, from within on_done, it ends by itself afterwards.
  ~Completions();
  Completions(const Completions&) = delete;
  Completions& operator=(const Completions&) = delete;

  // Before an operation with on_done is started. Throws std::system_error when there can be no thread.
  void start();
  // Once for each such operation when it is done. Any thread, with any lock held: nothing is called from here.
  void add(std::shared_ptr<Submission> submission);

 private:
  struct Queue;
  static void serve(const std::shared_ptr<Queue>& queue);

  const std::shared_ptr<Queue> queue_;  // also the thread's, which may live longer than this
  std::mutex mutex_;                    // guards thread_
  std::thread thread_;
};

}  // namespace horovod
