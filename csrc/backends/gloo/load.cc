// Finds the library with Gloo beside the library that holds this code.
#include <string>

#include <dlfcn.h>
#include <unistd.h>

#include "backends/gloo/backend.h"

namespace horovod {
namespace {

constexpr const char* kLibrary = "libhorovod_gloo.so";  // as named in gloo.cmake
constexpr const char* kFactory = "horovod_make_gloo_backend";

struct Library {
  Backend* (*make)(Mesh&, AbortSignal&) = nullptr;
  Status status;
};

Library load() {
  Dl_info here{};
  std::string path = dladdr(reinterpret_cast<const void*>(&gloo_available), &here) != 0 ? here.dli_fname : "";
  path = path.substr(0, path.rfind('/') + 1) + kLibrary;
  if (access(path.c_str(), F_OK) != 0) {
    return {nullptr,
            {Code::invalid_argument, error_code::missing_library,
             "This build of Horovod has no Gloo, because Gloo's headers were not there when it was built. Install "
             "libgloo-dev (on Debian and Ubuntu: apt-get install libgloo-dev) and install Horovod again."}};
  }
  // Lazy and local, so that neither Gloo's nor its dependencies' symbols meet those of a framework that brings its own.
  void* handle = dlopen(path.c_str(), RTLD_LAZY | RTLD_LOCAL);
  void* make = handle ? dlsym(handle, kFactory) : nullptr;
  if (!make) {
    const char* why = dlerror();
    return {
        nullptr,
        {Code::invalid_argument, error_code::missing_library,
         std::string("Horovod was built with Gloo, but it can't be loaded here (") + (why ? why : "unknown reason") +
             "). Install libgloo-dev again, or install Horovod again without it."}};
  }
  return {reinterpret_cast<Backend* (*)(Mesh&, AbortSignal&)>(make), {}};
}

const Library& library() {
  static const Library loaded = load();
  return loaded;
}

}  // namespace

Status gloo_available() { return library().status; }

std::unique_ptr<Backend> make_gloo_backend(Mesh& mesh, AbortSignal& abort, Status& status) {
  status = library().status;
  if (!status.ok()) return nullptr;
  std::unique_ptr<Backend> backend(library().make(mesh, abort));
  if (!backend)
    status = {Code::internal, error_code::out_of_memory, "Gloo could not be started: there is not enough memory."};
  return backend;
}

}  // namespace horovod
