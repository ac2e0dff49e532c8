// The coordinator's checks of a single rank's operation, for communicators of one member, which announce no operation.
#pragma once

#include "base/status.h"
#include "collectives/op_spec.h"

namespace horovod {

// Refuses (precondition) what the coordinator would refuse if `rank` of the world were the only one to take part, with
// its sentence. The coordinator is a program of its own without native code: coordinator/core/agreement/operations.py
// (defect) and coordinator/core/agreement/agreement.py hold the same checks, and tests/engine/test_checks_alone.py
// compares the two. What Engine::start() refuses in a world of any size, before the coordinator hears of it, is not
// repeated here.
Status check_alone(const OpSpec& spec, int rank);

}  // namespace horovod
