// The end of a connection: the last bytes go out, then it is closed or given to the next epoch.
#include "transport/mesh_connection.h"

#include <sys/socket.h>

namespace horovod::wire {

bool Connection::send_waiting() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!frame_started_) (void)flush(false);
  return control_.empty() && (!sealed_waits() || write_failed());
}

void Connection::end_output() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!control_.empty() || sealed_waits() || frame_started_) return;
  (void)shutdown(fd(), SHUT_WR);
  output_ended_ = true;
}

Socket Connection::hand_over(bool needs_all) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (ended_ || write_failed() || output_ended_) return {};
  if (needs_all && (!control_.empty() || sealed_waits() || frame_started_)) return {};
  write_failed_.store(true, std::memory_order_relaxed);
  return std::move(socket_);
}

void Connection::discard_input() {
  for (int i = 0; i < 64; ++i) {  // a peer that sends faster than this may get a reset
    if (recv(fd(), buffer_.data(), buffer_.size(), MSG_DONTWAIT) <= 0) return;
  }
}

}  // namespace horovod::wire
