#include "bindings/options.h"

#include <type_traits>

#include <pybind11/pybind11.h>

#include "bindings/errors.h"

namespace horovod {
namespace {

// Calls visit(name, field) for each field of a Config that is an option. Names are listed here and nowhere else in
// csrc.
template <typename Visit>
void visit_options(Config& config, const Visit& visit) {
  visit("fusion_threshold_bytes", config.fusion_threshold_bytes);
  visit("spin_us", config.spin_us);
  visit("yield_us", config.yield_us);
  visit("progress_timeout_ms", config.progress_timeout_ms);
  visit("unreachable_timeout_ms", config.unreachable_timeout_ms);
  visit("close_timeout_ms", config.close_timeout_ms);
  visit("staging_buffer_bytes", config.staging_buffer_bytes);
  visit("staging_buffer_count", config.staging_buffer_count);
  visit("background_cpu", config.background_cpu);
  visit("gloo", config.gloo);
  visit("full_mesh_members", config.full_mesh_members);
  visit("keeps_connections", config.keeps_connections);
  visit("wire", config.wire);
  visit("nccl_streams", config.nccl_streams);
  visit("nccl_operations", config.nccl_operations);
  visit("host_operations", config.host_operations);
  visit("staging_bytes", config.staging_bytes);
  visit("gpu_pack_threshold_bytes", config.gpu_pack_threshold_bytes);
  visit("gpu_pack_count", config.gpu_pack_count);
  visit("batched_copies", config.batched_copies);
  visit("async_completion", config.async_completion);
}

}  // namespace

Config config_from(Options options) {
  Config config;
  visit_options(config, [&](const char* name, auto& field) {
    if (const auto option = options.extract(name)) {
      field = static_cast<std::decay_t<decltype(field)>>(option.mapped());
    }
  });
  if (!options.empty()) refuse(error_code::internal, "Unknown engine option '" + options.begin()->first + "'.");
  return config;
}

Options options_of(Config config) {
  Options options;
  visit_options(config, [&](const char* name, auto& field) { options[name] = static_cast<int64_t>(field); });
  return options;
}

}  // namespace horovod
