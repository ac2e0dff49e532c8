#include "backends/gpu/adasum.h"

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
      }
      // Whoever runs it keeps the engine's own memory until it has passed.
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
  AdasumPath(std::shared_ptr<DevicePath> within, std::unique_ptr<DevicePath> between, bool one_host)
      : within_(std::move(within)), between_(std::move(between)), one_host_(one_host) {}

  Status run(Batch batch) override {
    const Step mean(batch, nullptr, OpType::allreduce, ReduceOp::average);
    HVD_TRY(within_->run(mean.batch()));
    if (one_host_) return finish(batch, mean);
    const Step across(batch, &mean, OpType::allreduce, ReduceOp::adasum);
    if (between_) HVD_TRY(between_->run(across.batch()));
    const Step spread(batch, between_ ? &across : &mean, OpType::broadcast, ReduceOp::sum);
    HVD_TRY(within_->run(spread.batch()));
    return finish(batch, spread);
  }

  bool busy() const override { return within_->busy() || (between_ && between_->busy()); }
  Status tend() override {
    HVD_TRY(within_->tend());
    return between_ ? between_->tend() : Status();
  }
  Status watch() override { return within_->watch(); }
  void abort() override {
    within_->abort();
    if (between_) between_->abort();
  }
  void close() override {
    within_->close();
    if (between_) between_->close();
  }

 private:
  static Status finish(Batch batch, const Step& last) {
    for (size_t i = 0; i < batch.size(); ++i) {
      batch[i]->on_device->finished = last.batch()[i]->on_device->finished;
    }
    return {};
  }

  const std::shared_ptr<DevicePath> within_;
  const std::unique_ptr<DevicePath> between_;
  const bool one_host_;
};

}  // namespace

std::unique_ptr<DevicePath> make_adasum_path(std::shared_ptr<DevicePath> within, std::unique_ptr<DevicePath> between,
                                             const Hosts& hosts) {
  return std::make_unique<AdasumPath>(std::move(within), std::move(between), hosts.count() == 1);
}

}  // namespace horovod
