// Faults on demand for both stand-ins: from the environment (NAME="cuInit:100 cuEventCreate:2") or by a call.
#pragma once

#include <csignal>
#include <cstdlib>
#include <map>
#include <mutex>
#include <sstream>
#include <string>

namespace standin {

class Faults {
 public:
  explicit Faults(const char* variable) {
    const char* text = std::getenv(variable);
    std::istringstream words(text ? text : "");
    for (std::string word; words >> word;) {
      const size_t colon = word.find(':');
      planned_[word.substr(0, colon)] = {std::atoi(word.c_str() + colon + 1), 0, true};
    }
  }

  static constexpr int kStop = -1;  // the process stops in the call, which then succeeds

  // The call of `function` after `skip` others answers `code`, once.
  void plan(const std::string& function, int code, int skip) {
    const std::lock_guard<std::mutex> lock(mutex_);
    planned_[function] = {code, skip, false};
  }

  // What this call of `function` is to answer; 0: nothing is planned.
  int due(const char* function) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (planned_.empty()) return 0;
    const auto found = planned_.find(function);
    if (found == planned_.end() || found->second.skip-- > 0) return 0;
    const int code = found->second.code;
    if (!found->second.always) planned_.erase(found);
    if (code != kStop) return code;
    (void)::raise(SIGSTOP);
    return 0;
  }

 private:
  struct Plan {
    int code = 0;
    int skip = 0;
    bool always = false;
  };
  std::mutex mutex_;  // guards planned_
  std::map<std::string, Plan> planned_;
};

}  // namespace standin
