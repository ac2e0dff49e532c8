#include "backends/cuda/driver.h"

namespace horovod::cuda {
namespace {

constexpr const char* kDriverFile = "libcuda.so.1";
constexpr int kOldest = 11020;  // CUDA 11.2, the first version with memory pools

std::string bind_all(Driver& driver, const ImportedLibrary& library) {
  std::string missing;
  const auto bind = [&](auto&... functions) { (functions.bind(library, missing), ...); };
  bind(driver.init, driver.version, driver.error_name, driver.error_text, driver.device_count, driver.device,
       driver.attribute, driver.retain_primary_context, driver.release_primary_context, driver.push_context,
       driver.pop_context, driver.stream_priorities, driver.create_stream, driver.destroy_stream, driver.wait_for_event,
       driver.capture_status, driver.exchange_capture_mode, driver.create_event, driver.destroy_event,
       driver.record_event, driver.query_event, driver.create_pool, driver.set_pool, driver.destroy_pool,
       driver.allocate, driver.free, driver.fill, driver.allocate_pinned, driver.free_pinned, driver.copy_to_host,
       driver.copy_from_host, driver.copy, driver.load_module, driver.unload_module, driver.find_function,
       driver.launch);
  return missing;
}

Status load_driver(const std::string& file, Driver& driver) {
  const ImportedLibrary library = ImportedLibrary::open(file);
  if (!library.loaded()) {
    return {Code::invalid_argument, error_code::no_gpu,
            "There is no NVIDIA driver on this host: its library can't be loaded (" + library.why() +
                "). Install the driver, name its libcuda.so.1 in HOROVOD_CUDA_LIBRARY where it is in an unusual place, "
                "or move the tensors to the CPU."};
  }
  int version = 0;
  const auto find_version = reinterpret_cast<int (*)(int*)>(library.find(driver.version.name));
  if (find_version && find_version(&version) == 0 && version < kOldest) {
    return {Code::invalid_argument, error_code::no_gpu,
            "The NVIDIA driver on this host (" + file + ") is of CUDA " + std::to_string(version / 1000) + "." +
                std::to_string(version % 1000 / 10) +
                ", but GPU tensors need 11.2 or newer. Update the driver, or move the tensors "
                "to the CPU."};
  }
  if (const std::string missing = bind_all(driver, library); !missing.empty()) {
    return {Code::invalid_argument, error_code::no_gpu,
            "The NVIDIA driver's library " + file + " lacks " + missing +
                ", which GPU tensors need. Update the driver (CUDA 11.2 or newer), or check "
                "what HOROVOD_CUDA_LIBRARY names."};
  }
  return {};
}

}  // namespace

Status Driver::failure(const char* function, int result) const {
  const char* name = nullptr;
  const char* text = nullptr;
  if (error_name(result, &name) != 0 || !name) name = "an error without a name";
  if (error_text(result, &text) != 0 || !text) text = "no explanation";
  return {
      Code::internal, error_code::gpu_failed,
      std::string("CUDA's ") + function + " failed with " + name + " (" + std::to_string(result) + ": " + text + ")."};
}

const Driver* driver(const std::string& file, Status& status) {
  return loaded_once<Driver>(file.empty() ? kDriverFile : file, load_driver, status);
}

}  // namespace horovod::cuda
