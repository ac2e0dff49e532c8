// The function that load.cc looks up in this library. No exception leaves it.
#include "backends/gloo/backend.h"

#include <exception>
#include <string>

#include "backends/gloo/plugin/collectives.h"
#include "backends/gloo/plugin/context.h"
#include "collectives/dispatch.h"

namespace horovod::gloo_plugin {
namespace {

constexpr Functions<Run> kFunctions = functions<Run>({{OpType::allreduce, allreduce},
                                                      {OpType::allgather, allgather},
                                                      {OpType::broadcast, broadcast},
                                                      {OpType::alltoall, alltoall},
                                                      {OpType::reducescatter, reducescatter}});

class GlooBackend final : public Backend {
 public:
  GlooBackend(Mesh& mesh, AbortSignal& abort) : context_(std::make_shared<MeshContext>(mesh, abort)) {}

  bool has(OpType type) const override { return horovod::has(kFunctions, type); }

  Status run(Batch batch) override {
    try {
      return dispatch<Run>(kFunctions, {context_, next_tag_}, batch);
    } catch (const MeshError& error) {
      return error.status;
    } catch (const std::exception& error) {
      return {Code::internal, error_code::gloo_failed, std::string("Gloo failed: ") + error.what()};
    }
  }

 private:
  const std::shared_ptr<::gloo::Context> context_;
  uint32_t next_tag_ = 0;
};

}  // namespace
}  // namespace horovod::gloo_plugin

extern "C" __attribute__((visibility("default"))) horovod::Backend* horovod_make_gloo_backend(
    horovod::Mesh& mesh, horovod::AbortSignal& abort) {
  try {
    return new horovod::gloo_plugin::GlooBackend(mesh, abort);
  } catch (const std::exception&) {
    return nullptr;
  }
}
