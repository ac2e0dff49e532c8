// Functions of a library that is looked for when it is first needed and not when this one is built or loaded. A table
// of them is complete or there is none, so no call site asks whether a function is there.
#pragma once

#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "base/status.h"

namespace horovod {

// A library of the process, never closed: the libraries that drive a device have threads and state that don't survive
// unloading.
class ImportedLibrary {
 public:
  // Null `handle` when it can't be loaded; `why` then is the loader's reason.
  static ImportedLibrary open(const std::string& file);

  bool loaded() const { return handle_ != nullptr; }
  const std::string& why() const { return why_; }
  void* find(const char* symbol) const;

 private:
  void* handle_ = nullptr;
  std::string why_;
};

// One function of the library, called by its name. Each function that we import returns a number, 0 for success.
template <typename... Arguments>
struct Imported {
  const char* name;
  int (*address)(Arguments...) = nullptr;

  template <typename... Given>
  int operator()(Given&&... given) const {
    return address(std::forward<Given>(given)...);
  }

  // Appends the name to `missing` when it is not there.
  void bind(const ImportedLibrary& library, std::string& missing) {
    address = reinterpret_cast<int (*)(Arguments...)>(library.find(name));
    if (!address) missing += (missing.empty() ? "" : ", ") + std::string(name);
  }
};

// The table of the library in `file`, filled by load(file, table) when it is asked for the first time; null where that
// failed, with its `status`. Any thread.
template <typename Table, typename Load>
const Table* loaded_once(const std::string& file, Load&& load, Status& status) {
  static std::mutex mutex;  // guards `known`, whose entries never change or go
  static auto* const known = new std::map<std::string, std::pair<Table, Status>>();
  const std::lock_guard<std::mutex> lock(mutex);
  auto found = known->find(file);
  if (found == known->end()) {
    found = known->try_emplace(file).first;
    found->second.second = load(file, found->second.first);
  }
  status = found->second.second;
  return status.ok() ? &found->second.first : nullptr;
}

}  // namespace horovod
