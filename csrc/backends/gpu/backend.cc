#include "backends/gpu/backend.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#include "backends/gpu/adasum.h"
#include "backends/nccl/backend.h"
#include "backends/nccl/reduction.h"
#include "backends/staging/backend.h"

namespace horovod {
namespace {

constexpr size_t kMostNotes = 32;

constexpr unsigned bit(OpType type) { return 1u << static_cast<unsigned>(type); }

bool is_adasum(const OpSpec& spec) { return spec.type == OpType::allreduce && spec.reduce_op == ReduceOp::adasum; }

// What this member has, as it tells the others with the first batch.
struct Offer {
  int32_t nccl_version = 0;  // 0: none
  int32_t capability = 0;    // compute capability of its GPU
  uint32_t host_operations = 0;
  char obstacle[500]{};  // a sentence why it has no NCCL; empty: it has
};

// What all members have in common.
struct Agreed {
  int nccl_version = 0;
  int capability = 0;
  unsigned host_operations = 0;
  std::string obstacle;  // which member has no NCCL, and why

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
             std::shared_ptr<DevicePath> nccl, std::unique_ptr<DevicePath> adasum, std::unique_ptr<DevicePath> staging,
             std::shared_ptr<cuda::Stream> stream, const Hosts& hosts)
      : options_(std::move(options)),
        device_(std::move(device)),
        peers_(std::move(peers)),
        mine_(mine),
        nccl_(std::move(nccl)),
        adasum_(std::move(adasum)),
        staging_(std::move(staging)),
        stream_(std::move(stream)),
        agreed_{mine.nccl_version, mine.capability, mine.host_operations, mine.obstacle},
        have_agreed_(peers_.size() == 1) {
    for (int host = 0; host < hosts.count(); ++host) host_sizes_.insert(static_cast<int>(hosts.members(host).size()));
  }

  Status mark_ready(Operation& operation) override {
    const OpSpec& spec = operation.spec;
    if (!nccl_ && (options_.config.nccl_operations & bit(spec.type)) != 0) {
      return {Code::invalid_argument, error_code::no_nccl,
              spec.name + ": HOROVOD_GPU_OPERATIONS or HOROVOD_GPU_" + name_of(spec.type) + " demands NCCL. " +
                  mine_.obstacle};
    }
    OnDevice& here = *operation.on_device;
    const auto stream = reinterpret_cast<cuda::StreamHandle>(here.stream);
    const std::lock_guard<std::mutex> lock(ready_mutex_);
    bool captured = false;
    HVD_TRY(device_->record_unless_captured(stream, here.ready, captured));
    if (captured) {
      return {Code::invalid_argument, error_code::graph_capture,
              spec.name +
                  ": the stream of its tensors is being captured into a CUDA graph, which an operation of Horovod's "
                  "can't be part of: it would run once, now, and not when the graph is replayed. End the capture "
                  "before (in PyTorch: the block of torch.cuda.graph), and submit after each replay."};
    }
    here.ready_number = ++ready_moments_;
    return {};
  }

  Status add_zeros(Operation& operation) override {
    operation.on_device = std::make_unique<OnDevice>();
    operation.on_device->ordinal = device_->ordinal();
    for (const TensorSpec& tensor : operation.spec.tensors) {
      const size_t bytes = tensor.bytes();
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
    Status status = queue(batch);
    if (status.ok()) return status;
    // The tensors may be let go when this returns, so nothing may go on that uses them. But the end of one of NCCL's
    // communicators may wait for all that runs on the device, so everybody must know first that it is to end.
    options_.failed(status);
    abort();
    return status;
  }

  bool has(OpType type) const override { return staging_->has(type); }
  bool busy() const override { return (nccl_ && (nccl_->busy() || adasum_->busy())) || staging_->busy(); }

  Status tend() override {
    if (nccl_) {
      HVD_TRY(nccl_->tend());
      HVD_TRY(adasum_->tend());
    }
    return staging_->tend();
  }
  Status watch() override {
    if (!nccl_) return {};
    HVD_TRY(nccl_->watch());
    return adasum_->watch();
  }
  void abort() override {
    if (nccl_) {
      // Both paths at once: either may wait for what is queued, and that, by way of the framework's stream, for the
      // other path.
      std::thread other([this] { adasum_->abort(); });
      nccl_->abort();
      other.join();
    }
    staging_->abort();
  }
  void close() override {
    if (nccl_) {
      adasum_->close();
      nccl_->close();
    }
    staging_->close();
  }

 private:
  Status queue(Batch batch) {
    if (!have_agreed_) HVD_TRY(agree());
    // All operations of a batch are alike in what matters here.
    const std::string obstacle = obstacle_to_nccl(batch[0]->spec);
    if (obstacle.empty()) return is_adasum(batch[0]->spec) ? adasum_->run(batch) : nccl_->run(batch);
    if (agreed_.nccl_version > 0) note_once(batch[0]->spec, obstacle);
    return staging_->run(batch);
  }

  // Why the operation goes through the host's memory; empty: it goes by NCCL.
  std::string obstacle_to_nccl(const OpSpec& spec) const {
    if (!nccl_ || agreed_.nccl_version == 0) return agreed_.obstacle;
    if ((agreed_.host_operations & bit(spec.type)) != 0) return "it was asked for (HOROVOD_GPU_OPERATIONS)";
    if (!nccl_->has(spec.type)) return std::string("NCCL has no ") + name_of(spec.type);
    if (!traits_of(spec.type).reduces) return {};
    for (size_t t = 0; t < spec.tensors.size(); ++t) {
      const DType dtype = spec.tensors[t].dtype;
      if (t > 0 && dtype == spec.tensors[t - 1].dtype) continue;
      if (is_float8(dtype) && agreed_.nccl_version < nccl::kHasFloat8) {
        return std::string("NCCL reduces ") + name_of(dtype) + " from 2.24 on, which not all ranks have";
      }
      if (is_float8(dtype) && agreed_.capability < nccl::kFloat8Capability) {
        return std::string("NCCL reduces ") + name_of(dtype) + " on GPUs of compute capability 9.0 or newer only";
      }
      if (Status status = plan(spec, dtype); !status.ok()) return status.message();
    }
    return {};
  }

  // Whether NCCL can reduce it: over all members at once, or for Adasum over the members of each host, to their mean.
  Status plan(const OpSpec& spec, DType dtype) const {
    nccl::ReductionPlan plan;
    if (!is_adasum(spec)) return nccl::plan_reduction(spec, dtype, peers_.size(), plan);
    OpSpec mean = spec;
    mean.reduce_op = ReduceOp::average;
    for (const int size : host_sizes_) HVD_TRY(nccl::plan_reduction(mean, dtype, size, plan));
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
      const bool asked_for = (agreed_.host_operations & kAllOperations) == kAllOperations;
      options_.note(
          peers_.rank == 0 && !asked_for,
          "GPU tensors of " + options_.scope + " go through the host's memory, for the reason of " + agreed_.obstacle);
    }
    return {};
  }

  // Notes each reason once, and no more reasons than a log can bear.
  void note_once(const OpSpec& spec, const std::string& obstacle) {
    if (noted_.size() >= kMostNotes || !noted_.insert(obstacle).second) return;
    options_.note(false, spec.name + " goes through the host's memory: " + obstacle + ".");
  }

  const GpuOptions options_;
  const std::shared_ptr<cuda::Device> device_;
  const cuda::Peers peers_;
  const Offer mine_;
  const std::shared_ptr<DevicePath> nccl_;    // null: there is none here, or settings never use it
  const std::unique_ptr<DevicePath> adasum_;  // beside nccl_
  const std::unique_ptr<DevicePath> staging_;
  const std::shared_ptr<cuda::Stream> stream_;  // of zeros
  std::mutex ready_mutex_;                      // guards the next, and that events are recorded in its order
  uint64_t ready_moments_ = 0;
  Agreed agreed_;     // at first what this member has; driver only, as the rest
  bool have_agreed_;  // true from the start for a member that is alone, as several threads may ask then
  std::set<std::string> noted_;
  std::set<int> host_sizes_;  // how many members the hosts have; constant
};

// The peers of one host, numbered by their places there.
cuda::Peers peers_within(const Hosts& hosts, const cuda::Peers& peers) {
  const std::vector<int>& members = hosts.members(hosts.host(peers.rank));
  cuda::Peers within = peers;
  within.rank = static_cast<int>(std::find(members.begin(), members.end(), peers.rank) - members.begin());
  within.labels.clear();
  for (const int member : members) within.labels.push_back(peers.labels[member]);
  within.hosts.assign(members.size(), 0);
  within.gather = [gather = peers.gather, members](const void* mine, size_t bytes,
                                                   std::vector<std::byte>& all) -> Status {
    std::vector<std::byte> everybody;
    HVD_TRY(gather(mine, bytes, everybody));
    all.clear();
    for (const int member : members) {
      const auto theirs = everybody.begin() + static_cast<std::ptrdiff_t>(bytes * static_cast<size_t>(member));
      all.insert(all.end(), theirs, theirs + static_cast<std::ptrdiff_t>(bytes));
    }
    return {};
  };
  return within;
}

// The plane as the first members of the hosts see it.
DataPlane between_hosts(const Hosts& hosts, Mesh* mesh) {
  DataPlane leaders;
  leaders.mesh = mesh;
  for (int host = 0; host < hosts.count(); ++host) leaders.members.push_back(hosts.leader(host));
  return leaders;
}

}  // namespace

std::unique_ptr<DeviceBackend> make_gpu_backend(GpuOptions options, const SharedGpu& gpu, const DataPlane& plane,
                                                cuda::Peers peers, Status& status) {
  Offer mine;
  mine.capability = gpu.device->capability();
  mine.host_operations = options.config.host_operations;
  std::string obstacle;
  // Members with a region share memory, so they are of one host whatever it is called.
  const Hosts hosts(plane.mesh ? peers.hosts : std::vector<int>(peers.hosts.size(), 0));
  std::shared_ptr<DevicePath> nccl;
  std::unique_ptr<DevicePath> adasum;
  if (const nccl::Library* library = wanted_nccl(options.config, obstacle)) {
    mine.nccl_version = library->version_code;
    nccl = make_nccl_backend(*library, options.config, gpu.device, peers, gpu.copier, status);
    if (!nccl) return nullptr;
    Config config = options.config;
    config.nccl_streams = 1;
    adasum = make_adasum_path(
        [=, mesh = plane.mesh](AdasumSteps& steps) -> Status {
          steps.within = nccl;
          if (hosts.count() == 1) return {};
          Status failed;
          steps.within =
              make_nccl_backend(*library, config, gpu.device, peers_within(hosts, peers), gpu.copier, failed);
          if (steps.within && hosts.leader(hosts.host(peers.rank)) == peers.rank) {
            steps.between = make_staging_backend(gpu.device, gpu.pool, between_hosts(hosts, mesh), peers, failed);
          }
          return failed;
        },
        hosts);
  }
  std::memcpy(mine.obstacle, obstacle.data(), std::min(obstacle.size(), sizeof mine.obstacle - 1));
  std::unique_ptr<DevicePath> staging = make_staging_backend(gpu.device, gpu.pool, plane, peers, status);
  if (!staging) return nullptr;
  std::shared_ptr<cuda::Stream> stream = gpu.device->create_stream(status);
  if (!stream) return nullptr;
  return std::make_unique<GpuBackend>(std::move(options), gpu.device, std::move(peers), mine, std::move(nccl),
                                      std::move(adasum), std::move(staging), std::move(stream), hosts);
}

}  // namespace horovod
