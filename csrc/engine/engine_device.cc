// Operations on tensors of a GPU: which GPU a rank uses, and when its caller may go on.
#include "backends/cuda/pinned.h"
#include "engine/engine.h"

namespace horovod {

Status Engine::open_device(int ordinal, std::shared_ptr<cuda::Device>& device,
                           std::shared_ptr<cuda::PinnedPool>& pool) {
  const std::lock_guard<std::mutex> lock(device_mutex_);
  if (!device_) {
    Status status;
    const cuda::Driver* driver = cuda::driver(config_.cuda_file, status);
    if (driver) device_ = cuda::Device::open(*driver, ordinal, status);
    if (!device_) return status;
    pool_ = std::make_shared<cuda::PinnedPool>(device_, config_.staging_bytes);
  }
  device = device_;
  pool = pool_;
  return {};
}

// Zeros on a GPU are wanted only if others have tensors there, so what is missing here is not said before.
void Engine::join_from(int ordinal) {
  std::shared_ptr<cuda::Device> device;
  std::shared_ptr<cuda::PinnedPool> pool;
  if (open_device(ordinal, device, pool).ok()) (void)global_->use(device, pool);
}

Status Engine::prepare_device(Submission& submission, Communicator& communicator) {
  const int ordinal = submission.on_device->ordinal;
  std::shared_ptr<cuda::Device> device;
  std::shared_ptr<cuda::PinnedPool> pool;
  if (Status status = open_device(ordinal, device, pool); !status.ok()) {
    return {status.code(), submission.spec.name + ": " + status.message()};
  }
  if (device->ordinal() != ordinal) {
    return {Code::invalid_argument, submission.spec.name + ": the tensor is on GPU " + std::to_string(ordinal) +
                                        ", but rank " + std::to_string(rank_) + " began on GPU " +
                                        std::to_string(device->ordinal()) +
                                        ", and a rank communicates from one GPU. Call "
                                        "torch.cuda.set_device(hvd.local_rank()) before tensors are made."};
  }
  return communicator.prepare(submission, device, pool);
}

bool Engine::over(const Submission& submission) const {
  if (submission.state.load(std::memory_order_acquire) != Operation::done) return false;
  if (!submission.on_device || config_.async_completion) return true;
  const std::shared_ptr<Moment>& finished = submission.on_device->finished;
  bool passed = false;
  // Neither a failure of the device nor the end of the epoch is worth waiting for; hand_over() tells.
  return !finished || !finished->passed(passed).ok() || passed || abort_.raised();
}

Status Engine::hand_over(Submission& submission, uintptr_t stream) {
  OnDevice& here = *submission.on_device;
  if (!submission.status.ok() || !here.finished) return submission.status;
  std::shared_ptr<cuda::Device> device;
  {
    const std::lock_guard<std::mutex> lock(device_mutex_);
    device = device_;
  }
  bool passed = false;
  HVD_TRY(here.finished->passed(passed));
  // Asked after that, because the end of an epoch makes what is queued pass without a result.
  if (abort_.raised()) return abort_.cause();
  if (!passed) {
    bool captured = false;
    HVD_TRY(device->is_captured(reinterpret_cast<cuda::StreamHandle>(stream), captured));
    if (captured) {
      return {Code::invalid_argument,
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
