#include "backends/cuda/compiler.h"

#include <vector>

#include "backends/cuda/kernels/sources.h"

namespace horovod::cuda {
namespace {

// The oldest version is tried first: older drivers, too, understand what it makes.
constexpr const char* kCompilerFiles[] = {"libnvrtc.so.11.2", "libnvrtc.so.12", "libnvrtc.so.13"};

std::string bind_all(Compiler& table, const ImportedLibrary& from) {
  std::string missing;
  const auto bind = [&](auto&... functions) { (functions.bind(from, missing), ...); };
  bind(table.target_count, table.targets, table.create, table.destroy, table.compile, table.log_size, table.log,
       table.cubin_size, table.cubin, table.ptx_size, table.ptx);
  table.result_text = reinterpret_cast<const char* (*)(int)>(from.find("nvrtcGetErrorString"));
  if (!table.result_text) missing += (missing.empty() ? "" : ", ") + std::string("nvrtcGetErrorString");
  return missing;
}

ImportedLibrary open_any(const std::string& file, std::string& opened) {
  ImportedLibrary library;
  for (const char* systems : kCompilerFiles) {
    opened = file.empty() ? systems : file;
    library = ImportedLibrary::open(opened);
    if (library.loaded() || !file.empty()) break;
  }
  return library;
}

Status load_compiler(const std::string& file, Compiler& table) {
  const ImportedLibrary from = open_any(file, table.file);
  if (!from.loaded()) {
    return {
        Code::invalid_argument, error_code::missing_library,
        "NVIDIA's run-time compiler can't be loaded (" + from.why() +
            "). PyTorch with CUDA brings it (the package nvidia-cuda-nvrtc-cu12, or nvidia-cuda-nvrtc for CUDA 13); "
            "name its libnvrtc.so in HOROVOD_NVRTC_LIBRARY where it is in an unusual place."};
  }
  if (const std::string missing = bind_all(table, from); !missing.empty()) {
    return {Code::invalid_argument, error_code::missing_library,
            "The library " + table.file + " lacks " + missing +
                ", which NVIDIA's run-time compiler has since CUDA 11.2. Check what "
                "HOROVOD_NVRTC_LIBRARY names."};
  }
  return {};
}

Status failure(const Compiler& with, const char* function, int result, const std::string& log = "") {
  const char* text = with.result_text(result);
  std::string sentence = "NVIDIA's run-time compiler " + with.file + " failed in " + function + ": " +
                         (text ? text : "no explanation") + " (" + std::to_string(result) + ").";
  if (!log.empty()) sentence += " It says: " + log;
  return {Code::internal, error_code::gpu_failed, sentence};
}

template <typename... Arguments, typename... Given>
Status call(const Compiler& with, const Imported<Arguments...>& function, Given... given) {
  const int result = function(given...);
  return result == 0 ? Status() : failure(with, function.name, result);
}

// Chooses the architecture to compile for: that of the device, or the newest before it, whose PTX the driver
// translates.
Status choose_target(const Compiler& with, int capability, int& target) {
  int count = 0;
  HVD_TRY(call(with, with.target_count, &count));
  std::vector<int> known(static_cast<size_t>(count > 0 ? count : 0));
  HVD_TRY(call(with, with.targets, known.data()));
  target = 0;
  for (const int one : known) {
    if (one <= capability && one > target) target = one;
  }
  if (target > 0) return {};
  return {Code::invalid_argument, error_code::missing_library,
          "NVIDIA's run-time compiler " + with.file + " knows no GPU as old as this one, of compute capability " +
              std::to_string(capability / 10) + "." + std::to_string(capability % 10) +
              ". Name one of CUDA 12 or older in HOROVOD_NVRTC_LIBRARY."};
}

// Owns a program of NVRTC.
class Program {
 public:
  explicit Program(const Compiler& with) : with_(with) {}
  ~Program() {
    if (handle_) (void)with_.destroy(&handle_);
  }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  Status compile(bool for_device, int target, std::string& image) {
    const char* headers[] = {kCopySpansHeader};
    const char* names[] = {kCopySpansHeaderName};
    HVD_TRY(call(with_, with_.create, &handle_, static_cast<const char*>(kCopySpansSource), "copy_spans.cu", 1,
                 static_cast<const char* const*>(headers), static_cast<const char* const*>(names)));
    const std::string architecture =
        "--gpu-architecture=" + std::string(for_device ? "sm_" : "compute_") + std::to_string(target);
    const char* options[] = {architecture.c_str(), "--std=c++17"};
    if (const int result = with_.compile(handle_, 2, static_cast<const char* const*>(options)); result != 0) {
      return failure(with_, with_.compile.name, result, log());
    }
    const auto& size_of = for_device ? with_.cubin_size : with_.ptx_size;
    const auto& take = for_device ? with_.cubin : with_.ptx;
    size_t bytes = 0;
    HVD_TRY(call(with_, size_of, handle_, &bytes));
    image.resize(bytes);
    return call(with_, take, handle_, image.data());
  }

 private:
  std::string log() const {
    size_t bytes = 0;
    if (with_.log_size(handle_, &bytes) != 0 || bytes == 0) return {};
    std::string text(bytes, '\0');
    if (with_.log(handle_, text.data()) != 0) return {};
    text.resize(text.find_last_not_of(std::string_view("\0\n ", 3)) + 1);
    return text;
  }

  const Compiler& with_;
  ProgramHandle handle_ = nullptr;
};

}  // namespace

const Compiler* compiler(const std::string& file, Status& status) {
  return loaded_once<Compiler>(file, load_compiler, status);
}

const CopyKernel* copy_kernel(const std::string& file, int capability, Status& status) {
  const auto make = [&](const std::string&, CopyKernel& kernel) -> Status {
    Status failed;
    const Compiler* with = compiler(file, failed);
    if (!with) return failed;
    int target = 0;
    HVD_TRY(choose_target(*with, capability, target));
    return Program(*with).compile(target == capability, target, kernel.image);
  };
  return loaded_once<CopyKernel>(file + " for " + std::to_string(capability), make, status);
}

}  // namespace horovod::cuda
