// Compiles the engine's kernel for the GPU that is there, by NVIDIA's run-time compiler: no CUDA is needed to build the
// engine, and GPUs that come later need no new wheel. NVRTC is found like the driver and NCCL (see driver.h), when the
// kernel is first wanted; PyTorch with CUDA brings it.
//
// Declared from NVRTC's user guide (docs.nvidia.com/cuda/nvrtc). The functions are those of 11.2 and newer.
#pragma once

#include <cstddef>
#include <string>

#include "base/imported.h"

namespace horovod::cuda {

using ProgramHandle = struct OpaqueProgram*;

struct Compiler {
  Imported<int*> target_count{"nvrtcGetNumSupportedArchs"};
  Imported<int*> targets{"nvrtcGetSupportedArchs"};  // ascending
  // The source, its name, and the headers that it includes: their number, texts and names.
  Imported<ProgramHandle*, const char*, const char*, int, const char* const*, const char* const*> create{
      "nvrtcCreateProgram"};
  Imported<ProgramHandle*> destroy{"nvrtcDestroyProgram"};
  Imported<ProgramHandle, int, const char* const*> compile{"nvrtcCompileProgram"};
  Imported<ProgramHandle, size_t*> log_size{"nvrtcGetProgramLogSize"};
  Imported<ProgramHandle, char*> log{"nvrtcGetProgramLog"};
  Imported<ProgramHandle, size_t*> cubin_size{"nvrtcGetCUBINSize"};
  Imported<ProgramHandle, char*> cubin{"nvrtcGetCUBIN"};
  Imported<ProgramHandle, size_t*> ptx_size{"nvrtcGetPTXSize"};
  Imported<ProgramHandle, char*> ptx{"nvrtcGetPTX"};
  const char* (*result_text)(int) = nullptr;

  std::string file;  // the name under which the loader found the library
};

// The table of the library in `file`, or of the system's where it is empty; loaded once. Null where there is none that
// can be used; `status` then says what was tried and what to do. Needs neither a GPU nor a driver. Any thread.
const Compiler* compiler(const std::string& file, Status& status);

// kernels/copy_spans.cu for devices of one compute capability.
struct CopyKernel {
  static constexpr const char* kName = "horovod_copy_spans";
  std::string image;  // what the driver loads: a cubin, or PTX where the compiler is older than the device
};

// Compiled once in this process by the library in `file` (see above). Null if that is not possible; `status` then says
// why. Takes a tenth of a second the first time. Any thread.
const CopyKernel* copy_kernel(const std::string& file, int capability, Status& status);

}  // namespace horovod::cuda
