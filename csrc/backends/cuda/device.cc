#include "backends/cuda/device.h"

#include <string>
#include <utility>

namespace horovod::cuda {

thread_local const Device* Device::Current::t_current_ = nullptr;

// An event that was recorded once. The handle goes back to the device, which records it again: a wait keeps to what was
// recorded when it was queued.
class Event final : public DeviceEvent {
 public:
  Event(std::shared_ptr<Device> device, EventHandle handle) : device_(std::move(device)), handle_(handle) {}
  ~Event() override { device_->recycle(handle_); }

  Status passed(bool& yes) override {
    yes = false;
    const Device::Current current(*device_);
    HVD_TRY(current.status());
    const Driver& driver = device_->driver();
    const int result = driver.query_event(handle_);
    if (result == kNotReady) return {};
    if (result != 0) return driver.failure(driver.query_event.name, result);
    yes = true;
    return {};
  }

  Status precede(uintptr_t stream) override {
    const Device::Current current(*device_);
    HVD_TRY(current.status());
    const Driver& driver = device_->driver();
    return driver.call(driver.wait_for_event, reinterpret_cast<StreamHandle>(stream), handle_, 0u);
  }

 private:
  const std::shared_ptr<Device> device_;
  const EventHandle handle_;
};

class Memory final : public DeviceMemory {
 public:
  Memory(std::shared_ptr<Stream> stream, Address address)
      : DeviceMemory(stream->device().ordinal()),
        stream_(std::move(stream)),
        user_(stream_->handle()),
        address_(address) {}
  ~Memory() override { stream_->device().give_back(address_, user_); }

  void hand_over(uintptr_t stream) override { user_ = reinterpret_cast<StreamHandle>(stream); }

 private:
  const std::shared_ptr<Stream> stream_;  // the stream on which the memory was allocated
  StreamHandle user_;
  const Address address_;
};

std::shared_ptr<Device> Device::open(const Driver& driver, int ordinal, Status& status) {
  int count = 0;
  status = driver.call(driver.init, 0u);
  if (status.ok()) status = driver.call(driver.device_count, &count);
  if (!status.ok()) {
    status = {Code::invalid_argument, error_code::no_gpu,
              "This host has an NVIDIA driver, but no GPU can be used: " + without_code(status.message()) +
                  " Check with nvidia-smi that it works and that this process may use it."};
    return nullptr;
  }
  if (ordinal < 0 || ordinal >= count) {
    status = {Code::invalid_argument, error_code::no_gpu,
              "There is no GPU " + std::to_string(ordinal) + ": this process sees " + std::to_string(count) +
                  ". CUDA_VISIBLE_DEVICES decides which they are."};
    return nullptr;
  }
  std::shared_ptr<Device> device(new Device(driver, ordinal));
  status = driver.call(driver.device, &device->device_, ordinal);
  int major = 0, minor = 0;
  if (status.ok()) status = driver.call(driver.attribute, &major, kCapabilityMajor, device->device_);
  if (status.ok()) status = driver.call(driver.attribute, &minor, kCapabilityMinor, device->device_);
  if (!status.ok()) return nullptr;
  device->capability_ = 10 * major + minor;
  status = driver.call(driver.retain_primary_context, &device->context_, device->device_);
  return status.ok() ? device : nullptr;
}

Device::~Device() {
  if (!context_ || is_of_a_parent()) return;
  give_back_postponed();
  {
    const Current current(*this);
    for (EventHandle event : idle_events_) (void)driver_.destroy_event(event);
    // What is on its way back to it, or postponed for ever, keeps it until then.
    if (pool_) (void)driver_.destroy_pool(pool_);
  }
  (void)driver_.release_primary_context(device_);
}

std::shared_ptr<Stream> Device::create_stream(Status& status) {
  const Current current(*this);
  int least = 0, greatest = 0;
  StreamHandle handle = nullptr;
  status = current.status();
  if (status.ok()) status = driver_.call(driver_.stream_priorities, &least, &greatest);
  if (status.ok()) status = driver_.call(driver_.create_stream, &handle, kNonBlocking, greatest);
  return status.ok() ? std::make_shared<Stream>(shared_from_this(), handle) : nullptr;
}

Stream::~Stream() {
  if (device_->is_of_a_parent()) return;
  const Device::Current current(*device_);
  (void)device_->driver().destroy_stream(handle_);
}

Status Device::record(StreamHandle stream, std::shared_ptr<DeviceEvent>& event) {
  const Current current(*this);
  HVD_TRY(current.status());
  return record_here(stream, event);
}

Status Device::record_unless_captured(StreamHandle stream, std::shared_ptr<DeviceEvent>& event, bool& captured) {
  const Current current(*this);
  HVD_TRY(current.status());
  HVD_TRY(is_captured_here(stream, captured));
  return captured ? Status() : record_here(stream, event);
}

Status Device::record_here(StreamHandle stream, std::shared_ptr<DeviceEvent>& event) {
  EventHandle handle = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!idle_events_.empty()) {
      handle = idle_events_.back();
      idle_events_.pop_back();
    }
  }
  if (!handle) HVD_TRY(driver_.call(driver_.create_event, &handle, kNoTiming));
  auto made = std::make_shared<Event>(shared_from_this(), handle);
  HVD_TRY(driver_.call(driver_.record_event, handle, stream));
  event = std::move(made);
  return {};
}

Status Device::is_captured(StreamHandle stream, bool& yes) {
  const Current current(*this);
  HVD_TRY(current.status());
  return is_captured_here(stream, yes);
}

Status Device::is_captured_here(StreamHandle stream, bool& yes) const {
  int state = kNotCapturing;
  const int result = driver_.capture_status(stream, &state);
  yes = result == kImplicitCapture || state != kNotCapturing;
  return result == 0 || yes ? Status() : driver_.failure(driver_.capture_status.name, result);
}

void Device::recycle(EventHandle event) {
  if (is_of_a_parent()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  idle_events_.push_back(event);
}

Status Device::pool(PoolHandle& pool) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!pool_) {
    PoolProperties properties;
    properties.ordinal = ordinal_;
    PoolHandle made = nullptr;
    const int result = driver_.create_pool(&made, &properties);
    if (result == kNotSupported) {
      return {Code::internal, error_code::gpu_failed,
              "GPU " + std::to_string(ordinal_) +
                  " has no memory pools, in which results are allocated (some virtual GPUs have none). "
                  "HOROVOD_GPU_OPERATIONS=host does not do without them; copy such tensors to the host "
                  "first."};
    }
    if (result != 0) return driver_.failure(driver_.create_pool.name, result);
    pool_ = made;
    uint64_t idle_bytes = kIdleBytes;
    (void)driver_.set_pool(pool_, kReleaseThreshold, &idle_bytes);  // a pool without a threshold works, only slower
  }
  pool = pool_;
  return {};
}

void Device::give_back(Address address, StreamHandle stream) {
  if (is_of_a_parent()) return;  // nobody may call the driver in a forked child
  bool captured = false;
  if (is_captured(stream, captured).ok() && captured) {  // a graph may free only what it has allocated
    const std::lock_guard<std::mutex> lock(mutex_);
    postponed_.emplace_back(address, stream);
    return;
  }
  const Current current(*this);
  (void)driver_.free(address, stream);
}

void Device::give_back_postponed() {
  std::vector<std::pair<Address, StreamHandle>> postponed;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    postponed.swap(postponed_);
  }
  for (const auto& [address, stream] : postponed) give_back(address, stream);
}

Status Device::allocate(size_t bytes, const std::shared_ptr<Stream>& stream, OutputBuffer& buffer) {
  const Current current(*this);
  HVD_TRY(current.status());
  give_back_postponed();
  PoolHandle from = nullptr;
  HVD_TRY(pool(from));
  Address address = 0;
  // CUDA allocates nothing for 0 bytes, but a result must have memory.
  const int result = driver_.allocate(&address, bytes > 0 ? bytes : 1, from, stream->handle());
  if (result == kOutOfMemory) {
    return {Code::internal, error_code::out_of_memory,
            "GPU " + std::to_string(ordinal_) + " has no memory left for a result of " + std::to_string(bytes) +
                " bytes. Free some, or use smaller tensors."};
  }
  if (result != 0) return driver_.failure(driver_.allocate.name, result);
  buffer.bytes = bytes;
  buffer.on_device = std::make_shared<Memory>(stream, address);
  buffer.data = {reinterpret_cast<std::byte*>(address), [](void*) {}};
  return {};
}

Status Device::allocate_rows(Operation& operation, size_t tensor, int64_t rows, const std::shared_ptr<Stream>& stream) {
  const TensorSpec& spec = operation.spec.tensors[tensor];
  OutputBuffer& output = operation.outputs[tensor];
  output.shape = spec.shape;
  if (output.shape.empty()) output.shape = {0};
  output.shape[0] = rows;
  const auto bytes = static_cast<size_t>(rows * spec.row_elements()) * size_of(spec.dtype);
  const Status status = allocate(bytes, stream, output);
  return status.ok() ? status : Status(status.code(), operation.spec.name + ": " + status.message());
}

}  // namespace horovod::cuda
