// Gloo as the thing that moves tensors between members: HOROVOD_CPU_OPERATIONS=gloo.
//
// Gloo's algorithms run over our mesh (see plugin/context.h), in the order of our log. They live in a library of their
// own beside this one, which is loaded when somebody asks for it: built only where Gloo's headers are, so a build
// without Gloo is a build without that file, and a host without Gloo can still load the engine.
#pragma once

#include <memory>

#include "base/abort.h"
#include "collectives/backend.h"
#include "transport/mesh.h"

namespace horovod {

// Ok if Gloo can be used; else why not, and how to get it. Loads the library.
Status gloo_available();

// The mesh and the signal must outlive the backend. Null if Gloo can't be used; `status` then says why.
std::unique_ptr<Backend> make_gloo_backend(Mesh& mesh, AbortSignal& abort, Status& status);

}  // namespace horovod
