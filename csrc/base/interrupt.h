// How a wait of the engine learns that a signal wants its thread.
#pragma once

namespace horovod {

// Set while a Python thread that can handle signals drives; says whether one asks to stop (see bindings).
using InterruptHook = bool (*)();
inline constinit thread_local InterruptHook t_interrupt_hook = nullptr;

}  // namespace horovod
