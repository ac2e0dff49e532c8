// A stand-in for NVIDIA's run-time compiler. What it makes says for which device it is and holds the text that it was
// made from; the stand-in for the driver has that text compiled for the host, and takes no other.
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

#include "faults.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace {

enum Result : int { kSuccess = 0, kInvalidInput = 3, kInvalidProgram = 4, kInvalidOption = 5, kCompilation = 6 };

constexpr int kTargets[] = {70, 75, 80, 90};

struct Program {
  std::string source, header, log, cubin, ptx;
};

standin::Faults g_faults{"STANDIN_NVRTC_FAIL"};

int take(const std::string& what, char* to) {
  if (what.empty()) return kInvalidProgram;
  std::memcpy(to, what.c_str(), what.size() + 1);
  return kSuccess;
}

}  // namespace

EXPORTED const char* nvrtcGetErrorString(int result) {
  return result == kCompilation     ? "NVRTC_ERROR_COMPILATION"
         : result == kInvalidOption ? "NVRTC_ERROR_INVALID_OPTION"
                                    : "an error";
}

EXPORTED int nvrtcGetNumSupportedArchs(int* count) {
  *count = std::size(kTargets);
  return kSuccess;
}

EXPORTED int nvrtcGetSupportedArchs(int* targets) {
  std::copy(std::begin(kTargets), std::end(kTargets), targets);
  return kSuccess;
}

EXPORTED int nvrtcCreateProgram(Program** program, const char* source, const char*, int headers,
                                const char* const* texts, const char* const* names) {
  if (const int fault = g_faults.due("nvrtcCreateProgram"); fault) return fault;
  if (headers != 1 || !std::strstr(source, ("#include \"" + std::string(names[0]) + "\"").c_str()))
    return kInvalidInput;
  *program = new Program{source, texts[0], "", "", ""};
  return kSuccess;
}

EXPORTED int nvrtcDestroyProgram(Program** program) {
  delete *program;
  *program = nullptr;
  return kSuccess;
}

EXPORTED int nvrtcCompileProgram(Program* program, int count, const char* const* options) {
  if (const int fault = g_faults.due("nvrtcCompileProgram"); fault) {
    program->log = "copy_spans.cu(1): error: said by the stand-in\n";
    return fault;
  }
  const std::string option = count > 0 ? options[0] : "", form = option.substr(0, option.find('_') + 1);
  const int target = std::atoi(option.c_str() + form.size());
  bool known = false;
  for (const int one : kTargets) known = known || one == target;
  if (!known || (form != "--gpu-architecture=sm_" && form != "--gpu-architecture=compute_")) {
    program->log = "nvrtc: error: invalid value for --gpu-architecture (-arch)\n";
    return kInvalidOption;
  }
  const std::string rest = std::to_string(target) + "\n" + program->source + program->header;
  program->ptx = "ptx " + rest;
  if (form == "--gpu-architecture=sm_") program->cubin = "cubin " + rest;
  return kSuccess;
}

EXPORTED int nvrtcGetProgramLogSize(Program* program, size_t* bytes) {
  *bytes = program->log.size() + 1;
  return kSuccess;
}
EXPORTED int nvrtcGetProgramLog(Program* program, char* log) {
  std::memcpy(log, program->log.c_str(), program->log.size() + 1);
  return kSuccess;
}
EXPORTED int nvrtcGetCUBINSize(Program* program, size_t* bytes) {
  *bytes = program->cubin.empty() ? 0 : program->cubin.size() + 1;
  return kSuccess;
}
EXPORTED int nvrtcGetCUBIN(Program* program, char* cubin) { return take(program->cubin, cubin); }
EXPORTED int nvrtcGetPTXSize(Program* program, size_t* bytes) {
  *bytes = program->ptx.empty() ? 0 : program->ptx.size() + 1;
  return kSuccess;
}
EXPORTED int nvrtcGetPTX(Program* program, char* ptx) { return take(program->ptx, ptx); }

// -- for tests --------------------------------------------------------------------------------------------------------

EXPORTED void standin_nvrtc_fail(const char* function, int code, int skip) { g_faults.plan(function, code, skip); }
