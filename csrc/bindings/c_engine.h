// What the Python module needs of c_api.cc beside the table.
#pragma once

#include <memory>

#include "bindings/c_api.h"

namespace horovod {

class Engine;

// A reference for callers in C, who release it.
HorovodEngine* make_c_engine(const std::shared_ptr<Engine>& engine);

// What HorovodApi::current_engine returns; takes the reference over. Null: none.
void set_current(HorovodEngine* engine);

}  // namespace horovod
