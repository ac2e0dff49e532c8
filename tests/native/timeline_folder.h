// A place for a timeline that is checked and then removed.
#pragma once

#include <cstdlib>
#include <fstream>
#include <string>

#include <unistd.h>

#include "check.h"

namespace horovod::testing {

class TimelineFolder {
 public:
  TimelineFolder() { CHECK(mkdtemp(folder_) != nullptr); }
  TimelineFolder(const TimelineFolder&) = delete;
  TimelineFolder& operator=(const TimelineFolder&) = delete;
  ~TimelineFolder() {
    ::unlink(path().c_str());
    ::rmdir(folder_);
  }

  std::string path() const { return std::string(folder_) + "/timeline.json"; }

  // The file is complete, and has as many ends as beginnings.
  void check() const {
    std::ifstream file(path());
    std::string line, last;
    int64_t open = 0;
    for (bool first = true; std::getline(file, line); first = false, last = line) {
      CHECK(!first || line == "[");
      open += line.find(R"("ph":"B")") != std::string::npos;
      open -= line.find(R"("ph":"E")") != std::string::npos;
    }
    CHECK(last == "]" && open == 0, "%s, %lld open", last.c_str(), static_cast<long long>(open));
  }

 private:
  char folder_[40] = "/tmp/horovod-timeline-XXXXXX";
};

}  // namespace horovod::testing
