#include "engine/host_channel.h"

#include <algorithm>

namespace horovod {
namespace {

// Messages in the ring are aligned so, and there is always room for the header of a `skip`.
uint64_t padded(uint64_t length) { return (sizeof(HostMessage) + length + 15) / 16 * 16; }

}  // namespace

// Finds the place at written_ for a message of this length; null when there is no room.
std::byte* HostWriter::claim(uint32_t length) {
  const uint64_t size = padded(length);
  const uint64_t left = HostMemory::kBytes - written_ % HostMemory::kBytes;
  const uint64_t skipped = size > left ? left : 0;
  if (written_ + skipped + size > limit_) {
    uint64_t slowest = ~uint64_t{0};
    for (const std::atomic<uint64_t>* reader : readers_) slowest = std::min(slowest, reader->load());
    limit_ = slowest + HostMemory::kBytes;
    if (written_ + skipped + size > limit_) return nullptr;
  }
  std::byte* to = memory_.ring + written_ % HostMemory::kBytes;
  if (skipped > 0) {
    const HostMessage skip{HostMessage::skip, 0, 0, static_cast<uint32_t>(skipped - sizeof(HostMessage))};
    std::memcpy(to, &skip, sizeof(skip));
    written_ += skipped;
    to = memory_.ring;
  }
  return to;
}

void HostWriter::publish(uint32_t length) {
  written_ += padded(length);
  // Sequentially consistent, like all accesses that the two sides make before one of them sleeps.
  memory_.written.value.store(written_);
}

bool HostWriter::flush() {
  while (!backlog_.empty()) {
    const std::string& kept = backlog_.front();
    const auto length = static_cast<uint32_t>(kept.size() - sizeof(HostMessage));
    std::byte* to = claim(length);
    if (!to) {
      memory_.starved.value.store(1);
      to = claim(length);  // a reader that made room before the flag was set has not woken this writer
      if (!to) return false;
    }
    std::memcpy(to, kept.data(), kept.size());
    publish(length);
    backlog_.pop_front();
  }
  return true;
}

Status HostReader::peek(HostMessage& message, std::string_view& payload, bool& found) {
  for (;;) {
    const uint64_t written = memory_->written.value.load();
    const uint64_t unread = written - read_;
    found = unread > 0;
    if (!found) return {};
    if (unread > HostMemory::kBytes) {
      return bad("says that it wrote up to " + std::to_string(written) + " into shared memory, where " +
                 std::to_string(read_) + " to " + std::to_string(read_ + HostMemory::kBytes) + " is possible");
    }
    const uint64_t at = read_ % HostMemory::kBytes;
    std::memcpy(&message, memory_->ring + at, sizeof(message));  // only this copy is read from here on
    const uint64_t size = padded(message.length);
    if (size > std::min(unread, HostMemory::kBytes - at) || message.kind > HostMessage::closed) {
      return bad("wrote a message of kind " + std::to_string(message.kind) + " with " + std::to_string(message.length) +
                 " bytes into " + std::to_string(unread) + " bytes of shared memory");
    }
    next_ = read_ + size;
    if (message.kind != HostMessage::skip) break;
    read_ = next_;
  }
  payload = {reinterpret_cast<const char*>(memory_->ring + read_ % HostMemory::kBytes + sizeof(message)),
             message.length};
  return {};
}

Status HostReader::bad(const std::string& what) const {
  return {Code::aborted, error_code::unexpected_data, capitalized(label_) + " " + what + "; this world ends."};
}

bool HostReader::consume() {
  read_ = next_;
  cursor_->store(read_);
  return memory_->starved.value.load() != 0 && memory_->starved.value.exchange(0) != 0;
}

}  // namespace horovod
