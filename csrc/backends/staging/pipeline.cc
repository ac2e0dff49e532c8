#include "backends/staging/pipeline.h"

#include <algorithm>
#include <deque>
#include <utility>

#include "base/clock.h"
#include "base/interrupt.h"
#include "base/limits.h"

namespace horovod::staging {

Pipeline::~Pipeline() {
  // If the device stands still, it may yet write to these buffers, so they are given to nobody else.
  if (drain()) rest();
}

Status Pipeline::await(DeviceEvent& event, const std::string& what) const {
  Wait wait(limits::kCopyWait);
  const int64_t began_us = now_us();
  int64_t asked_us = began_us;
  for (;;) {
    bool passed = false;
    HVD_TRY(event.passed(passed));
    if (passed) return {};
    if (peers_.abort->raised()) return peers_.abort->cause();
    const int64_t now = now_us();
    if (wait.phase(now) != Wait::sleeps) {
      wait.turn(now);
      continue;
    }
    // A peer that has left in order has done its part; whether anything is missing is for the data plane to find out.
    if (Status status = peers_.look(); !status.ok() && status.code() != Code::left) return status;
    HVD_TRY(peers_.watch());
    const auto me = [&] { return capitalized(peers_.labels[peers_.rank]); };
    if (now - began_us > peers_.timeout_us) {
      return {Code::timeout, error_code::gpu_stalled,
              me() + " has waited " + std::to_string(peers_.timeout_us / 1000) + " ms for its own GPU to come to " +
                  what + ": what the framework has queued there before does not end."};
    }
    if (t_interrupt_hook && now - asked_us > limits::kSignalCheckUs) {
      asked_us = now;
      if (t_interrupt_hook())
        return {Code::interrupted, error_code::interrupted, me() + " was interrupted by a signal during an operation."};
    }
    wait.turn(now);
  }
}

Status Pipeline::run(const Chunks& chunks, const std::string& what) {
  std::deque<std::pair<Chunk, Buffer*>> ahead;
  for (bool more = true;;) {
    while (more && ahead.size() < kAhead) {
      Chunk chunk;
      more = chunks(chunk);
      if (!more) break;
      Buffer& buffer = buffers_[next_buffer_++ % kBuffers];
      HVD_TRY(fetch(chunk, buffer));
      ahead.emplace_back(std::move(chunk), &buffer);
    }
    if (ahead.empty()) return {};
    auto& [chunk, buffer] = ahead.front();
    HVD_TRY(await(*buffer->coming, what));
    HVD_TRY(chunk.work(buffer->memory));
    HVD_TRY(send(chunk, *buffer));
    ahead.pop_front();
  }
}

Status Pipeline::fetch(const Chunk& chunk, Buffer& buffer) {
  if (!buffer.memory) HVD_TRY(pool_->take(buffer.memory));
  used_ = true;
  cuda::Device& device = down_->device();
  // The buffer's last chunk must have left before anything else comes, or is put there by the host.
  if (buffer.gone) HVD_TRY(buffer.gone->precede(reinterpret_cast<uintptr_t>(down_->handle())));
  {
    const cuda::Device::Current current(device);
    HVD_TRY(current.status());
    const cuda::Driver& driver = device.driver();
    for (const Piece& piece : chunk.in) {
      HVD_TRY(
          driver.call(driver.copy_to_host, buffer.memory + piece.offset, piece.device, piece.bytes, down_->handle()));
    }
  }
  return device.record(down_->handle(), buffer.coming);
}

Status Pipeline::send(const Chunk& chunk, Buffer& buffer) {
  cuda::Device& device = up_->device();
  {
    const cuda::Device::Current current(device);
    HVD_TRY(current.status());
    const cuda::Driver& driver = device.driver();
    for (const Piece& piece : chunk.out) {
      HVD_TRY(
          driver.call(driver.copy_from_host, piece.device, buffer.memory + piece.offset, piece.bytes, up_->handle()));
    }
  }
  return device.record(up_->handle(), buffer.gone);
}

bool Pipeline::drain() {
  if (!used_) return true;
  bool over = true;
  const int64_t end_us = now_us() + limits::kDeviceEndUs;
  for (const auto& stream : {down_, up_}) {
    std::shared_ptr<DeviceEvent> end;
    bool passed = false;
    Status status = stream->device().record(stream->handle(), end);
    const auto is_over = [&] {  // an error is the device's, on which nothing runs any more
      if (status.ok()) status = end->passed(passed);
      return passed || !status.ok();
    };
    over = wait_until(limits::kDeviceEndWait, end_us, is_over) && over;
  }
  return over;
}

void Pipeline::rest() {
  for (Buffer& buffer : buffers_) {
    if (buffer.memory) pool_->give_back(buffer.memory);
    buffer = {};
  }
  used_ = false;
}

}  // namespace horovod::staging
