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

  // Called before an operation with on_done is started. Throws std::system_error if the thread can't be started.
  void start();
  // Called once for each such operation when it is done. Any thread, with any lock held: it calls nothing itself.
  void add(std::shared_ptr<Submission> submission);

 private:
  struct Queue;
  static void serve(const std::shared_ptr<Queue>& queue);

  const std::shared_ptr<Queue> queue_;  // shared with the thread, which may live longer than this object
  std::mutex mutex_;                    // guards thread_
  std::thread thread_;
};

}  // namespace horovod
