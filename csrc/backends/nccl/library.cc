#include "backends/nccl/library.h"

namespace horovod::nccl {
namespace {

constexpr const char* kSystemsOwn = "libnccl.so.2";
constexpr int kOldest = 21400;

// NCCL's version number 22703 is 2.27.3; before 2.9, 2804 was 2.8.4.
std::string in_words(int code) {
  const int major = code < 10000 ? 1000 : 10000;
  return std::to_string(code / major) + "." + std::to_string(code % major / 100) + "." + std::to_string(code % 100);
}

std::string bind_all(Library& table, const ImportedLibrary& from) {
  std::string missing;
  const auto bind = [&](auto&... functions) { (functions.bind(from, missing), ...); };
  bind(table.unique_id, table.init_rank, table.finalize, table.destroy, table.abort, table.async_error,
       table.group_start, table.group_end, table.create_premul_sum, table.destroy_op, table.all_reduce, table.broadcast,
       table.reduce, table.reduce_scatter, table.all_gather, table.send, table.receive);
  table.result_text = reinterpret_cast<const char* (*)(int)>(from.find("ncclGetErrorString"));
  table.last_error = reinterpret_cast<const char* (*)(CommHandle)>(from.find("ncclGetLastError"));
  if (!table.result_text || !table.last_error)
    missing += (missing.empty() ? "" : ", ") + std::string("its error texts");
  return missing;
}

Status load(const std::string& file, Library& table) {
  table.file = file;
  const ImportedLibrary from = ImportedLibrary::open(file);
  if (!from.loaded()) {
    return {Code::invalid_argument, error_code::no_nccl,
            "There is no NCCL on this host: it can't be loaded (" + from.why() +
                "). PyTorch with CUDA brings it (the package nvidia-nccl-cu12 or newer), or install libnccl2; name the "
                "file in HOROVOD_NCCL_LIBRARY where it is in an unusual place."};
  }
  std::string missing;
  table.version.bind(from, missing);
  if (!missing.empty() || table.version(&table.version_code) != kSuccess) {
    return {Code::invalid_argument, error_code::no_nccl,
            "The library " + file +
                " was loaded, but doesn't tell its version as NCCL does. Check what "
                "HOROVOD_NCCL_LIBRARY names."};
  }
  if (table.version_code < kOldest) {
    return {Code::invalid_argument, error_code::no_nccl,
            "NCCL on this host (" + file + ") is " + in_words(table.version_code) +
                ", but 2.14 or newer is needed, which doesn't block the host. Install a newer "
                "one, or name it in HOROVOD_NCCL_LIBRARY."};
  }
  if (missing = bind_all(table, from); !missing.empty()) {
    return {Code::invalid_argument, error_code::no_nccl,
            "The library " + file + " says that it is NCCL " + in_words(table.version_code) + ", but lacks " + missing +
                ". Check what HOROVOD_NCCL_LIBRARY names."};
  }
  return {};
}

}  // namespace

Status Library::failure(const char* function, int result, CommHandle comm) const {
  const char* text = result_text(result);
  std::string sentence = std::string("NCCL's ") + function + " failed: " + (text ? text : "no explanation") + " (" +
                         std::to_string(result) + ")";
  const char* detail = last_error(comm);
  if (detail && *detail) sentence += "; its last error is \"" + std::string(detail) + "\"";
  return {Code::internal, error_code::nccl_failed, sentence + ". NCCL_DEBUG=INFO shows more."};
}

const Library* library(const std::string& file, Status& status) {
  return loaded_once<Library>(file.empty() ? kSystemsOwn : file, load, status);
}

}  // namespace horovod::nccl
