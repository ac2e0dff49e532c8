#include "backends/gpu/adasum.h"

#include <atomic>
#include <mutex>
#include <utility>
#include <vector>

namespace horovod {
namespace {

// A batch on the tensors of another one, for a step of it.
class Step {
 public:
  // after: the step before this one, whose results it works on; null: the first, on the inputs.
  Step(Batch whole, const Step* after, OpType type, ReduceOp op) : operations_(whole.size()) {
    for (size_t i = 0; i < whole.size(); ++i) {
      Operation& part = operations_[i];
      part.spec = whole[i]->spec;
      part.spec.type = type;
      part.spec.reduce_op = op;
      part.spec.root = 0;
      part.spans = whole[i]->spans;
      part.on_device = std::make_unique<OnDevice>(*whole[i]->on_device);
      if (after) {
        part.spec.prescale = part.spec.postscale = 1.0;
        for (Span& span : part.spans) span.input = span.output;
        part.on_device->ready = after->operations_[i].on_device->finished;
        part.on_device->ready_number = 0;
      }
      // The path that runs this part keeps the engine's own memory until the device is done with it.
      for (const OutputBuffer& output : whole[i]->outputs) part.outputs.emplace_back().on_device = output.on_device;
      batch_.push_back(&part);
    }
  }

  Batch batch() const { return batch_; }

 private:
  std::vector<Operation> operations_;
  std::vector<Operation*> batch_;
};

class AdasumPath final : public DevicePath {
 public:
  AdasumPath(MakeAdasumSteps make, bool one_host) : make_(std::move(make)), one_host_(one_host) {}

  Status run(Batch batch) override {
    HVD_TRY(begin());
    const AdasumSteps steps = made();
    const Step mean(batch, nullptr, OpType::allreduce, ReduceOp::average);
    HVD_TRY(steps.within->run(mean.batch()));
    if (one_host_) return finish(batch, mean);
    const Step across(batch, &mean, OpType::allreduce, ReduceOp::adasum);
    if (steps.between) HVD_TRY(steps.between->run(across.batch()));
    const Step spread(batch, steps.between ? &across : &mean, OpType::broadcast, ReduceOp::sum);
    HVD_TRY(steps.within->run(spread.batch()));
    return finish(batch, spread);
  }

  bool has(OpType type) const override { return type == OpType::allreduce; }
  bool busy() const override {
    const AdasumSteps steps = made();
    return (steps.within && steps.within->busy()) || (steps.between && steps.between->busy());
  }
  Status tend() override {
    return visit([](DevicePath& path) { return path.tend(); });
  }
  Status watch() override {
    return visit([](DevicePath& path) { return path.watch(); });
  }
  void abort() override {
    ended_.store(true);
    (void)visit([](DevicePath& path) {
      path.abort();
      return Status();
    });
  }
  void close() override {
    (void)visit([](DevicePath& path) {
      path.close();
      return Status();
    });
  }

 private:
  AdasumSteps made() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return steps_;
  }
  template <typename Act>
  Status visit(Act&& act) {
    const AdasumSteps steps = made();
    if (steps.within) HVD_TRY(act(*steps.within));
    return steps.between ? act(*steps.between) : Status();
  }

  // Makes the steps before the first batch. Either this or an abort by another thread sees the other; what has been
  // aborted then says so when it is to run.
  Status begin() {
    if (!made().within) {
      AdasumSteps steps;
      HVD_TRY(make_(steps));
      const std::lock_guard<std::mutex> lock(mutex_);
      steps_ = std::move(steps);
    }
    if (ended_.load()) abort();
    return {};
  }

  static Status finish(Batch batch, const Step& last) {
    for (size_t i = 0; i < batch.size(); ++i) {
      batch[i]->on_device->finished = last.batch()[i]->on_device->finished;
    }
    return {};
  }

  const MakeAdasumSteps make_;
  const bool one_host_;
  std::atomic<bool> ended_{false};
  mutable std::mutex mutex_;  // guards steps_
  AdasumSteps steps_;         // NCCL within hosts and Adasum between them; made with the first batch
};

}  // namespace

std::unique_ptr<DevicePath> make_adasum_path(MakeAdasumSteps make, const Hosts& hosts) {
  return std::make_unique<AdasumPath>(std::move(make), hosts.count() == 1);
}

}  // namespace horovod
