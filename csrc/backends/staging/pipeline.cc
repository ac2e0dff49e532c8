#include "backends/staging/pipeline.h"

#include <algorithm>
#include <deque>
#include <utility>

#include "base/clock.h"
#include "base/interrupt.h"
#include "base/limits.h"

namespace horovod::staging {

Pipeline::~Pipeline() {
  // What a device that stands still may yet write to is nobody else's.
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
    const std::string& me = peers_.labels[peers_.rank];
    if (now - began_us > peers_.timeout_us) {
      return {Code::timeout, me + " has waited " + std::to_string(peers_.timeout_us / 1000) +
                                 " ms for its own GPU to come to " + what +
                                 ": what the framework has queued there before does not end."};
    }
    if (t_interrupt_hook && now - asked_us > limits::kSignalCheckUs) {
      asked_us = now;
      if (t_interrupt_hook()) return {Code::interrupted, me + " was interrupted by a signal during an operation."};
    }
    wait.turn(now);
  }
}

Status Pipeline::run(const Chunks& chunks, const std::string& what) {
  std::deque<std::pair<Chunk, Slot*>> ahead;
  for (bool more = true;;) {
    while (more && ahead.size() < kAhead) {
      Chunk chunk;
      more = chunks(chunk);
      if (!more) break;
      Slot& slot = slots_[next_slot_++ % kSlots];
      HVD_TRY(fetch(chunk, slot));
      ahead.emplace_back(std::move(chunk), &slot);
    }
    if (ahead.empty()) return {};
    auto& [chunk, slot] = ahead.front();
    HVD_TRY(await(*slot->coming, what));
    HVD_TRY(chunk.work(slot->memory));
    HVD_TRY(send(chunk, *slot));
    ahead.pop_front();
  }
}

Status Pipeline::fetch(const Chunk& chunk, Slot& slot) {
  if (!slot.memory) HVD_TRY(pool_->take(slot.memory));
  used_ = true;
  cuda::Device& device = down_->device();
  // The slot's last chunk must have left before anything else comes, or is put there by the host.
  if (slot.gone) HVD_TRY(slot.gone->precede(reinterpret_cast<uintptr_t>(down_->handle())));
  {
    const cuda::Device::Current current(device);
    HVD_TRY(current.status());
    const cuda::Driver& driver = device.driver();
    for (const Piece& piece : chunk.in) {
      HVD_TRY(driver.call(driver.copy_to_host, slot.memory + piece.offset, piece.device, piece.bytes, down_->handle()));
    }
  }
  return device.record(down_->handle(), slot.coming);
}

Status Pipeline::send(const Chunk& chunk, Slot& slot) {
  cuda::Device& device = up_->device();
  {
    const cuda::Device::Current current(device);
    HVD_TRY(current.status());
    const cuda::Driver& driver = device.driver();
    for (const Piece& piece : chunk.out) {
      HVD_TRY(driver.call(driver.copy_from_host, piece.device, slot.memory + piece.offset, piece.bytes, up_->handle()));
    }
  }
  return device.record(up_->handle(), slot.gone);
}

bool Pipeline::drain() {
  if (!used_) return true;
  bool over = true;
  const int64_t end_us = now_us() + limits::kDeviceEndUs;
  for (const auto& stream : {down_, up_}) {
    std::shared_ptr<DeviceEvent> end;
    bool passed = false;
    Status status = stream->device().record(stream->handle(), end);
    const auto is_over = [&] {  // an error is one of the device, on which nothing runs any more
      if (status.ok()) status = end->passed(passed);
      return passed || !status.ok();
    };
    over = wait_until(limits::kDeviceEndWait, end_us, is_over) && over;
  }
  return over;
}

void Pipeline::rest() {
  for (Slot& slot : slots_) {
    if (slot.memory) pool_->give_back(slot.memory);
    slot = {};
  }
  used_ = false;
}

}  // namespace horovod::staging
