#include "backends/gpu/backend.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <utility>

#include "backends/nccl/backend.h"
#include "backends/nccl/reduction.h"
#include "backends/staging/backend.h"

namespace horovod {
namespace {

constexpr size_t kMostNotes = 32;
constexpr unsigned kEverything = (1u << static_cast<unsigned>(OpType::barrier)) - 1;  // all that have tensors

constexpr unsigned bit(OpType type) { return 1u << static_cast<unsigned>(type); }

bool reduces(const OpSpec& spec) { return spec.type == OpType::allreduce || spec.type == OpType::reducescatter; }

// What a member has, as it tells the others.
struct Offer {
  int32_t nccl_version = 0;  // 0: none
  int32_t capability = 0;    // of its GPU
  uint32_t host_operations = 0;
  char obstacle[500]{};  // why it has no NCCL: a sentence
};

// What all members have.
struct Agreed {
  int nccl_version = 0;
  int capability = 0;
  unsigned host_operations = 0;
  std::string obstacle;  // who has no NCCL, and why

  void add(const Offer& offer, const std::string& label) {
    nccl_version = std::min<int>(nccl_version, offer.nccl_version);
    capability = std::min<int>(capability, offer.capability);
    host_operations |= offer.host_operations;
    if (offer.nccl_version == 0 && obstacle.empty()) obstacle = label + ": " + offer.obstacle;
  }
};

class GpuBackend final : public DeviceBackend {
 public:
  GpuBackend(GpuOptions options, std::shared_ptr<cuda::Device> device, cuda::Peers peers, const Offer& mine,
             std::unique_ptr<DevicePath> nccl, std::unique_ptr<DevicePath> staging,
             std::shared_ptr<cuda::Stream> stream)
      : options_(std::move(options)),
        device_(std::move(device)),
        peers_(std::move(peers)),
        mine_(mine),
        nccl_(std::move(nccl)),
        staging_(std::move(staging)),
        stream_(std::move(stream)),
        agreed_{mine.nccl_version, mine.capability, mine.host_operations, mine.obstacle},
        have_agreed_(peers_.size() == 1) {}

  Status mark_ready(Operation& operation) override {
    const OpSpec& spec = operation.spec;
    if (!nccl_ && (options_.config.nccl_operations & bit(spec.type)) != 0) {
      return {Code::invalid_argument, spec.name + ": HOROVOD_GPU_OPERATIONS or HOROVOD_GPU_" + name_of(spec.type) +
                                          " demands NCCL. " + mine_.obstacle};
    }
    OnDevice& here = *operation.on_device;
    return device_->record(reinterpret_cast<cuda::StreamHandle>(here.stream), here.ready);
  }

  Status add_zeros(Operation& operation) override {
    operation.on_device = std::make_unique<OnDevice>();
    operation.on_device->ordinal = device_->ordinal();
    for (const TensorSpec& tensor : operation.spec.tensors) {
      const size_t bytes = static_cast<size_t>(tensor.elements()) * size_of(tensor.dtype);
      OutputBuffer input, result;
      HVD_TRY(device_->allocate(bytes, stream_, input));
      HVD_TRY(device_->allocate(bytes, stream_, result));
      if (bytes > 0) {
        const cuda::Device::Current current(*device_);
        HVD_TRY(device_->driver().call(device_->driver().fill, reinterpret_cast<cuda::Address>(input.data.get()),
                                       static_cast<unsigned char>(0), bytes, stream_->handle()));
      }
      operation.spans.push_back({input.data.get(), result.data.get(), tensor.elements()});
      operation.outputs.push_back(std::move(input));
      operation.outputs.push_back(std::move(result));
    }
    return device_->record(stream_->handle(), operation.on_device->ready);
  }

  bool takes_nccl(const OpSpec& spec) const override { return obstacle_to_nccl(spec).empty(); }

  Status run(Batch batch) override {
    if (!have_agreed_) HVD_TRY(agree());
    // A batch of several is alike in all that matters here.
    const std::string obstacle = obstacle_to_nccl(batch[0]->spec);
    if (obstacle.empty()) return nccl_->run(batch);
    if (agreed_.nccl_version > 0) note_once(batch[0]->spec, obstacle);
    return staging_->run(batch);
  }

  bool busy() const override { return (nccl_ && nccl_->busy()) || staging_->busy(); }

  Status tend() override {
    if (nccl_) HVD_TRY(nccl_->tend());
    return staging_->tend();
  }
  void abort() override {
    if (nccl_) nccl_->abort();
    staging_->abort();
  }
  void close() override {
    if (nccl_) nccl_->close();
    staging_->close();
  }

 private:
  // Why the host's memory it is; empty: NCCL.
  std::string obstacle_to_nccl(const OpSpec& spec) const {
    if (!nccl_ || agreed_.nccl_version == 0) return agreed_.obstacle;
    if ((agreed_.host_operations & bit(spec.type)) != 0) return "it was asked for (HOROVOD_GPU_OPERATIONS)";
    if (!reduces(spec)) return {};
    nccl::ReductionPlan plan;
    for (size_t t = 0; t < spec.tensors.size(); ++t) {
      const DType dtype = spec.tensors[t].dtype;
      if (t > 0 && dtype == spec.tensors[t - 1].dtype) continue;
      if (is_float8(dtype) && agreed_.nccl_version < nccl::kHasFloat8) {
        return std::string("NCCL reduces ") + name_of(dtype) + " from 2.24 on, which not all ranks have";
      }
      if (is_float8(dtype) && agreed_.capability < nccl::kFloat8Capability) {
        return std::string("NCCL reduces ") + name_of(dtype) + " on GPUs of compute capability 9.0 or newer only";
      }
      if (Status status = nccl::plan_reduction(spec, dtype, peers_.size(), plan); !status.ok()) return status.message();
    }
    return {};
  }

  Status agree() {
    std::vector<std::byte> all;
    HVD_TRY(peers_.gather(&mine_, sizeof mine_, all));
    agreed_ = {mine_.nccl_version, mine_.capability, 0, {}};
    for (size_t member = 0; member < peers_.labels.size(); ++member) {
      Offer theirs;
      std::memcpy(&theirs, all.data() + member * sizeof theirs, sizeof theirs);
      theirs.obstacle[sizeof theirs.obstacle - 1] = '\0';
      agreed_.add(theirs, peers_.labels[member]);
    }
    have_agreed_ = true;
    if (agreed_.nccl_version == 0) {
      const bool asked_for = (agreed_.host_operations & kEverything) == kEverything;
      options_.note(
          peers_.rank == 0 && !asked_for,
          "GPU tensors of " + options_.scope + " go through the host's memory, for the reason of " + agreed_.obstacle);
    }
    return {};
  }

  // Each reason once, and no more of them than a log can bear.
  void note_once(const OpSpec& spec, const std::string& obstacle) {
    if (noted_.size() >= kMostNotes || !noted_.insert(obstacle).second) return;
    options_.note(false, spec.name + " goes through the host's memory: " + obstacle + ".");
  }

  const GpuOptions options_;
  const std::shared_ptr<cuda::Device> device_;
  const cuda::Peers peers_;
  const Offer mine_;
  const std::unique_ptr<DevicePath> nccl_;  // null: not here, or never used
  const std::unique_ptr<DevicePath> staging_;
  const std::shared_ptr<cuda::Stream> stream_;  // of zeros
  Agreed agreed_;                               // at first what this member has; driver only, as the rest
  bool have_agreed_;                            // a member alone has from the start, as several threads may ask then
  std::set<std::string> noted_;
};

}  // namespace

std::unique_ptr<DeviceBackend> make_gpu_backend(GpuOptions options, std::shared_ptr<cuda::Device> device,
                                                std::shared_ptr<cuda::PinnedPool> pool, const DataPlane& plane,
                                                cuda::Peers peers, Status& status) {
  Offer mine;
  mine.capability = device->capability();
  mine.host_operations = options.config.host_operations;
  std::string obstacle = "HOROVOD_GPU_OPERATIONS asks for it.";
  std::unique_ptr<DevicePath> nccl;
  if ((options.config.host_operations & kEverything) != kEverything) {
    Status found;
    if (const nccl::Library* library = nccl::library(options.config.nccl_file, found)) {
      mine.nccl_version = library->version_code;
      const auto tell = [note = options.note](const std::string& sentence) { note(true, sentence); };
      nccl = make_nccl_backend(*library, options.config, device, peers, tell, status);
      if (!nccl) return nullptr;
    }
    obstacle = found.message();
  }
  std::memcpy(mine.obstacle, obstacle.data(), std::min(obstacle.size(), sizeof mine.obstacle - 1));
  std::unique_ptr<DevicePath> staging = make_staging_backend(device, std::move(pool), plane, peers, status);
  if (!staging) return nullptr;
  std::shared_ptr<cuda::Stream> stream = device->create_stream(status);
  if (!stream) return nullptr;
  return std::make_unique<GpuBackend>(std::move(options), std::move(device), std::move(peers), mine, std::move(nccl),
                                      std::move(staging), std::move(stream));
}

}  // namespace horovod
