// How a wait of the engine learns that a signal wants its thread.
#pragma once

namespace horovod {

// Set while the driving thread is a Python thread that can handle signals; says whether a signal asks to stop.
using InterruptHook = bool (*)();
inline constinit thread_local InterruptHook t_interrupt_hook = nullptr;

}  // namespace horovod
