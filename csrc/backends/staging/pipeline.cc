#include "backends/staging/pipeline.h"

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <deque>
#include <utility>

#include "base/clock.h"
#include "base/interrupt.h"

namespace horovod::staging {
namespace {

constexpr int kQuickTurns = 200;  // looks before a thread that waits for the device sleeps between them
constexpr int64_t kNapUs = 50;    // and how long: longer where it has waited long, as for the end of a backward pass
constexpr int64_t kMostNapUs = 500;
constexpr int64_t kDrainUs = 5'000'000;
constexpr int64_t kInterruptUs = 100'000;  // between two questions whether a signal wants this thread

void nap(int64_t waited_us = 0) {
  const timespec moment{0, std::min(kMostNapUs, kNapUs + waited_us / 16) * 1000};
  nanosleep(&moment, nullptr);
}

}  // namespace

Pipeline::~Pipeline() {
  // What a device that stands still may yet write to is nobody else's.
  if (drain()) rest();
}

Status Pipeline::await(Moment& moment, const std::string& what) const {
  int64_t began_us = 0, asked_us = 0;
  for (int turn = 0;; ++turn) {
    bool passed = false;
    HVD_TRY(moment.passed(passed));
    if (passed) return {};
    if (peers_.abort->raised()) return peers_.abort->cause();
    if (turn < kQuickTurns) {
      sched_yield();
      continue;
    }
    const int64_t now = now_us();
    if (began_us == 0) began_us = asked_us = now;
    // A peer that has left in order has done its part; whether anything is missing is for the data plane to find out.
    if (Status status = peers_.look(); !status.ok() && status.code() != Code::left) return status;
    HVD_TRY(peers_.watch());
    const std::string& me = peers_.labels[peers_.rank];
    if (now - began_us > peers_.timeout_us) {
      return {Code::timeout, me + " has waited " + std::to_string(peers_.timeout_us / 1000) +
                                 " ms for its own GPU to come to " + what +
                                 ": what the framework has queued there before does not end."};
    }
    if (t_interrupt_hook && now - asked_us > kInterruptUs) {
      asked_us = now;
      if (t_interrupt_hook()) return {Code::interrupted, me + " was interrupted by a signal during an operation."};
    }
    nap(now - began_us);
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
  const int64_t end_us = now_us() + kDrainUs;
  for (const auto& stream : {down_, up_}) {
    std::shared_ptr<Moment> end;
    bool passed = false;
    Status status = stream->device().record(stream->handle(), end);
    while (status.ok() && !passed && now_us() < end_us) {
      nap();
      status = end->passed(passed);
    }
    over = over && (passed || !status.ok());  // an error is one of the device, on which nothing runs any more
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
