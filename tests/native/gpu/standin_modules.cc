// The part of the driver's stand-in that loads and launches kernels, and copies on the device. The engine's kernel is
// compiled into this file for the host. What is loaded must have come from the very same text.
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>

#include "cuda_on_host.h"
#include "cuda_parts.h"
#include "cuda_world.h"
// After these two: it is CUDA C++.
#include "backends/cuda/kernels/copy_spans.cu"

using namespace standin;
using horovod::cuda::SpanTable;

namespace {

struct Module {
  int device = 0;
  std::atomic<int> running{0};  // launches that the device has not passed
};

std::mutex g_mutex;  // guards g_modules
std::map<void*, std::shared_ptr<Module>> g_modules;
std::atomic<int64_t> g_launches{0}, g_copies{0};

std::string text_of(const char* name) {
  std::ifstream file(std::string(STANDIN_KERNELS "/") + name);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

// A function's handle is its module's: there is one in each.
std::shared_ptr<Module> module_of(void* handle) {
  const std::lock_guard<std::mutex> lock(g_mutex);
  const auto found = g_modules.find(handle);
  return found == g_modules.end() ? nullptr : found->second;
}

bool all_there(const SpanTable& table, int device) {
  for (unsigned i = 0; i < table.spans; ++i) {
    for (const unsigned long long address : {table.from[i], table.to[i]}) {
      if (!standin_cuda_holds(reinterpret_cast<const void*>(address), table.bytes[i], device)) return false;
    }
  }
  return true;
}

struct Launch {
  std::shared_ptr<Module> module;
  SpanTable table;
  unsigned blocks = 0, threads = 0;

  void run() {
    if (!all_there(table, module->device)) std::abort();  // it was freed before the device came to it
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
      for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) horovod_copy_spans(table);
    }
    module->running.fetch_sub(1);
  }
};

}  // namespace

int64_t standin::count_of_modules(const std::string& what) {
  const std::lock_guard<std::mutex> lock(g_mutex);
  return what == "modules"    ? static_cast<int64_t>(g_modules.size())
         : what == "launches" ? g_launches.load()
         : what == "copies"   ? g_copies.load()
                              : -1;
}

EXPORTED int cuModuleLoadData(void** module, const void* image) {
  if (const int fault = fault_of("cuModuleLoadData"); fault) return fault;
  {
    const std::lock_guard<std::mutex> lock(world().mutex);
    if (const int refused = allow_unsafe_call(); refused) return refused;
  }
  auto made = std::make_shared<Module>();
  if (cuCtxGetDevice(&made->device) != 0) return kInvalidContext;
  int major = 0, minor = 0;
  if (cuDeviceGetAttribute(&major, 75, made->device) != 0 || cuDeviceGetAttribute(&minor, 76, made->device) != 0) {
    return kInvalidValue;
  }
  std::istringstream text(static_cast<const char*>(image));  // see standin_nvrtc.cc
  std::string form;
  int target = 0;
  text >> form >> target;
  if (form != "cubin" && form != "ptx") return kInvalidValue;
  if (form == "cubin" ? target != 10 * major + minor : target > 10 * major + minor) return kNoBinaryForGpu;
  const std::string rest(std::istreambuf_iterator<char>(text.ignore()), {});
  if (rest != text_of("copy_spans.cu") + text_of("copy_spans.h")) return kInvalidValue;
  *module = made.get();
  const std::lock_guard<std::mutex> lock(g_mutex);
  g_modules.emplace(*module, made);
  return kSuccess;
}

EXPORTED int cuModuleUnload(void* module) {
  const std::shared_ptr<Module> found = module_of(module);
  if (!found) return kInvalidHandle;
  if (found->running.load() > 0) std::abort();  // under a kernel that runs or will
  const std::lock_guard<std::mutex> lock(g_mutex);
  g_modules.erase(module);
  return kSuccess;
}

EXPORTED int cuModuleGetFunction(void** function, void* module, const char* name) {
  if (const int fault = fault_of("cuModuleGetFunction"); fault) return fault;
  if (!module_of(module)) return kInvalidHandle;
  if (std::strcmp(name, "horovod_copy_spans") != 0) return kNotFound;
  *function = module;
  return kSuccess;
}

EXPORTED int cuLaunchKernel(void* function, unsigned blocks, unsigned blocks_y, unsigned blocks_z, unsigned threads,
                            unsigned threads_y, unsigned threads_z, unsigned shared_bytes, void* stream,
                            void** parameters, void** extra) {
  if (const int fault = fault_of("cuLaunchKernel"); fault) return fault;
  auto launch = std::make_unique<Launch>();
  launch->module = module_of(function);
  if (!launch->module || standin_cuda_device_of(stream) != launch->module->device) return kInvalidHandle;
  if (blocks == 0 || threads == 0 || threads > horovod::cuda::kBlockThreads || blocks_y * blocks_z != 1 ||
      threads_y * threads_z != 1 || shared_bytes != 0 || extra) {
    return kInvalidValue;
  }
  std::memcpy(&launch->table, parameters[0], sizeof launch->table);  // the driver keeps no address of the caller's
  launch->blocks = blocks;
  launch->threads = threads;
  if (!all_there(launch->table, launch->module->device)) return kIllegalAddress;
  launch->module->running.fetch_add(1);
  g_launches.fetch_add(1);
  return cuLaunchHostFunc(
      stream, [](void* data) { std::unique_ptr<Launch>(static_cast<Launch*>(data))->run(); }, launch.release());
}

EXPORTED int cuMemcpyDtoDAsync_v2(uintptr_t to, uintptr_t from, size_t bytes, void* stream) {
  if (const int fault = fault_of("cuMemcpyDtoDAsync_v2"); fault) return fault;
  struct Copy {
    uintptr_t to, from;
    size_t bytes;
  };
  const int device = standin_cuda_device_of(stream);
  for (const uintptr_t address : {to, from}) {
    if (!standin_cuda_holds(reinterpret_cast<const void*>(address), bytes, device)) return kInvalidValue;
  }
  g_copies.fetch_add(1);
  return cuLaunchHostFunc(
      stream,
      [](void* data) {
        const std::unique_ptr<Copy> copy(static_cast<Copy*>(data));
        std::memcpy(reinterpret_cast<void*>(copy->to), reinterpret_cast<const void*>(copy->from), copy->bytes);
      },
      new Copy{to, from, bytes});
}
