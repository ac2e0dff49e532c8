// The engine's Config as Python gives it: numbers by the names of the fields.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "base/config.h"

namespace horovod {

using Options = std::map<std::string, int64_t>;

// Fields that are not among the options keep their defaults; ValueError for a name that is none.
Config config_from(Options options);
Options options_of(Config config);

}  // namespace horovod
