#include "base/imported.h"

#include <dlfcn.h>

namespace horovod {

ImportedLibrary ImportedLibrary::open(const std::string& file) {
  ImportedLibrary library;
  // Lazy and local, so that its symbols don't meet those of a framework that brings its own copy.
  library.handle_ = dlopen(file.c_str(), RTLD_LAZY | RTLD_LOCAL);
  if (!library.handle_) {
    const char* why = dlerror();
    library.why_ = why ? why : file + ": unknown reason";
  }
  return library;
}

void* ImportedLibrary::find(const char* symbol) const { return dlsym(handle_, symbol); }

}  // namespace horovod
