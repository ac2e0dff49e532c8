// Tells callers that their operations are done.
//
// An operation completes under the lock of its communicator, on the thread that drives or ends the epoch. A caller's
// on_done may submit the next operation, which takes that lock, or take a lock of its own under which another thread
// submits. So on_done must not run there. The operation is put into a queue instead, and one thread of the engine,
// which holds no lock, calls Submission::on_done for one operation after the other.
#pragma once

#include <memory>
#include <mutex>
#include <thread>

namespace horovod {

struct Submission;

class Completions {
 public:
  Completions();
  // Calls on_done for the operations that are left, and ends the thread. When this destructor is called from within an
  // on_done, the thread can't wait for itself and ends after that call.
  ~Completions();
  Completions(const Completions&) = delete;
  Completions& operator=(const Completions&) = delete;

  // Called before an operation with on_done is started. Throws std::system_error if the thread can't be started.
  void start();
  // Called once for each such operation when it is done, by any thread and with any lock held, as it only queues.
  void add(std::shared_ptr<Submission> submission);

 private:
  struct Queue;
  static void serve(const std::shared_ptr<Queue>& queue);

  const std::shared_ptr<Queue> queue_;  // shared with the thread, which may live longer than this object
  std::mutex mutex_;                    // guards thread_
  std::thread thread_;
};

}  // namespace horovod
