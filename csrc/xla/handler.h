// The collectives inside of what XLA compiles, for every framework that compiles with it: one custom call, "horovod",
// whose attributes say which. It needs XLA's C interface (ffi.h) and the engine's (bindings/c_api.h), no framework.
//
// The handler waits, and works for the engine meanwhile, as an eager call does; with the attribute "asynchronous" it
// returns at once, and XLA computes what needs none of the results. The first argument and result of a call is a number
// that nobody uses, or a token of XLA: each call is given that of the one before it in the script, so that XLA runs
// them in this order, which is the same on all ranks (docs/adr/0049, docs/adr/0084).
//
// On a GPU the arrays are in its memory, and what XLA has queued on its stream makes them ready. There the handler
// waits until the engine has queued the collective, and lets XLA's stream wait for the result.
#pragma once

#include <cstdint>
#include <string>

#include "bindings/c_client.h"
#include "xla/ffi.h"

namespace horovod::xla {

// What the framework brings. Its sentences are for people who know its names.
struct Host {
  Answer (*set_number)(int64_t process_set_id) = nullptr;  // the engine's number of a process set that has this rank
  const char* rows_differ = "";                            // why the ranks' numbers of rows must be the same
  const char* other_version = "";                          // of XLA's interface
};

// XLA's platforms "Host" and "CUDA".
enum class Platform { host, cuda };

// The handler of the call "horovod" on a platform, for a framework that registers it with XLA itself. XLA asks it for
// the version of the interface; to one that it does not know it answers with an error. `host` is the same in all calls.
Handler handler_for(const Host& host, Platform platform);

// Whether XLA only asks a handler for the version of the interface, which do_nothing() answers.
bool asks_for_version(const CallFrame& frame);

// A handler for a call whose results have the memory, and the values, of its arguments: for XLA they depend on each
// other. The version of the interface is known to it once handler_for() was called.
Error* do_nothing(CallFrame* frame);

// Registers that of the platform "Host" where the framework hands out XLA's interface. Why XLA can't call the
// collectives; "" if it can now.
std::string register_handler(const Api* api, const Host& host);

}  // namespace horovod::xla
