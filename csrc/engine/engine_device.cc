// Operations on tensors of a GPU: which GPU a rank uses, and when its caller may go on.
#include "engine/engine.h"

namespace horovod {

Status Engine::open_gpu(int ordinal, SharedGpu& gpu) {
  const std::lock_guard<std::mutex> lock(gpu_mutex_);
  if (!gpu_.device) {
    const auto tell = [this](const std::string& sentence) { outbox_.note(true, sentence); };
    HVD_TRY(SharedGpu::open(config_, ordinal, tell, gpu_));
  }
  gpu = gpu_;
  return {};
}

// Zeros on a GPU are needed only if other ranks have tensors on GPUs, so an error is not reported before that.
void Engine::join_from(int ordinal) {
  SharedGpu gpu;
  if (open_gpu(ordinal, gpu).ok()) (void)global_->device().use(gpu);
}

Status Engine::open_own_gpu(int ordinal, SharedGpu& gpu) {
  HVD_TRY(open_gpu(ordinal, gpu));
  if (gpu.device->ordinal() == ordinal) return {};
  return {Code::invalid_argument, error_code::wrong_gpu,
          "the tensor is on GPU " + std::to_string(ordinal) + ", but rank " + std::to_string(rank_) + " began on GPU " +
              std::to_string(gpu.device->ordinal()) +
              ", and a rank communicates from one GPU. Choose it before tensors are made, as with "
              "torch.cuda.set_device(hvd.local_rank()), or start the job with horovodrun --pin-gpus."};
}

Status Engine::copy_on_gpu(int ordinal, void* to, const void* from, size_t bytes, uintptr_t stream) {
  SharedGpu gpu;
  HVD_TRY(open_own_gpu(ordinal, gpu));
  const cuda::Device::Current current(*gpu.device);
  HVD_TRY(current.status());
  const cuda::Driver& driver = gpu.device->driver();
  return driver.call(driver.copy, reinterpret_cast<cuda::Address>(to), reinterpret_cast<cuda::Address>(from), bytes,
                     reinterpret_cast<cuda::StreamHandle>(stream));
}

Status Engine::prepare_device(Submission& submission, Communicator& communicator) {
  SharedGpu gpu;
  Status status = open_own_gpu(submission.on_device->ordinal, gpu);
  DeviceWork& work = communicator.device();
  if (status.ok()) status = work.use(gpu);
  if (!status.ok()) return {status.code(), submission.spec.name + ": " + status.message()};
  return work.backend()->mark_ready(submission);
}

bool Engine::over(const Submission& submission) const {
  if (!submission.is_done()) return false;
  // After a failure of the device or the end of the epoch there is nothing to wait for; hand_over() returns the error.
  return config_.async_completion || is_over(submission) || abort_.raised();
}

Status Engine::results() const {
  const std::lock_guard<std::mutex> lock(gpu_mutex_);
  return gpu_.device && abort_.raised() ? abort_.cause() : Status();
}

Status Engine::hand_over(Submission& submission, uintptr_t stream) {
  OnDevice& here = *submission.on_device;
  if (!submission.status.ok() || !here.finished) return submission.status;
  std::shared_ptr<cuda::Device> device;
  {
    const std::lock_guard<std::mutex> lock(gpu_mutex_);
    device = gpu_.device;
  }
  const cuda::Device::Current current(*device);  // for all of the calls below
  HVD_TRY(current.status());
  bool passed = false;
  HVD_TRY(here.finished->passed(passed));
  // Asked after passed(), because the end of an epoch makes queued work pass without a result.
  if (abort_.raised()) return abort_.cause();
  if (!passed) {
    bool captured = false;
    HVD_TRY(device->is_captured(reinterpret_cast<cuda::StreamHandle>(stream), captured));
    if (captured) {
      return {Code::invalid_argument, error_code::graph_capture,
              submission.spec.name +
                  ": the stream that is to wait for its result is being captured into a CUDA graph, which can't wait "
                  "for what is not part of it. Synchronize the operation before the capture begins."};
    }
    HVD_TRY(here.finished->precede(stream));
  }
  for (OutputBuffer& output : submission.outputs) {
    if (output.on_device) output.on_device->hand_over(stream);
  }
  return {};
}

}  // namespace horovod
