// Every time limit of the engine that is no setting, and why it is what it is. The settings among the limits
// (HOROVOD_SPIN_US and so on) stand in base/config.h.
//
// The unit is in the name. A limit that ends something has a sentence for the user where it is used.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/wait.h"

namespace horovod::limits {

// -- looking around while a thread waits ------------------------------------------------------------------------------
// No sleep of a driver is longer: it then looks whether its peers live and whether the epoch was aborted. A lost
// process is noticed within a second, and twenty wake-ups in a second cost nothing that can be measured.
inline constexpr int64_t kPeerCheckUs = 50'000;
// So often a thread that waits for peers looks for one whose host acknowledges nothing: a system call for each
// connection, for limits of many seconds.
inline constexpr int64_t kSilenceCheckUs = 1'000'000;
// What was sent to a host that lives, over a network that works, is acknowledged within this time.
inline constexpr int64_t kAcknowledgedMs = 1'000;
// A caller waits in slices of this length. After each it looks whether a signal (Ctrl-C) wants its thread, and counts
// as blocked; a person notices no tenth of a second.
inline constexpr int64_t kSignalCheckUs = 100'000;
// A caller that has waited this long looks whether others wait for it (bindings/impatience.h). A rank that is only late
// is seldom later than that, and a deadlock that is ended after it costs no more than that.
inline constexpr int64_t kImpatientUs = 1'000;
// How often a caller looks again after that.
inline constexpr int64_t kImpatientAgainUs = 500;
// While bytes of the network are under way, a thread that waits in shared memory leaves them alone for so long. Sockets
// hold what a fast network brings meanwhile.
inline constexpr int64_t kNetworkTurnUs = 200;
// How often a thread that waits for something else looks what a device has done: callers don't wait for devices, so
// no caller notices a failure there.
inline constexpr int64_t kDeviceCheckUs = 10'000;

// -- how long a thread polls ------------------------------------------------------------------------------------------
// A caller that has waited so long for one operation polls no more: the rank that is late is late by more than a
// wake-up costs.
inline constexpr int64_t kPatientUs = 10'000;
// A kernel of TensorFlow waits so long for a small operation that it has started, in a thread that could run others: it
// takes microseconds where all ranks have arrived, and where they have not a callback costs little in comparison.
inline constexpr int64_t kKernelHelpUs = 100;
// Over sockets, a thread that waits for news polls only while a byte has moved so recently: else the next is far.
inline constexpr int64_t kLivelyUs = 2'000;
// NCCL connects in the background and wakes no thread. It takes milliseconds at best, or seconds.
inline constexpr WaitPolicy kNcclWait{.yield_us = 2'000, .nap_us = 200};
// The host waits for a copy from a device: mostly microseconds, but long at the end of a backward pass.
inline constexpr WaitPolicy kCopyWait{.yield_us = 200, .nap_us = 50, .longest_nap_us = 500};
// A device is to finish what is queued there, and nothing depends on when that is noticed.
inline constexpr WaitPolicy kDeviceEndWait{.nap_us = 200};
// The result of an operation on a device, which the host was asked to wait for (HOROVOD_ENABLE_ASYNC_COMPLETION=0).
inline constexpr int64_t kDeviceResultNapUs = 50;

// -- the background thread --------------------------------------------------------------------------------------------
// So long it lets small operations gather before it starts them: they seldom come alone, and one batch is cheaper.
inline constexpr int64_t kGatherUs = 200;
// The wait is prolonged by this much each time that operations have come meanwhile, up to this much in all; each time
// costs a wake-up.
inline constexpr int64_t kGatherAgainUs = 1'000;
inline constexpr int64_t kGatherMostUs = 5'000;
// The background thread drives in slices of this length, and looks for its other duties between them.
inline constexpr int64_t kDriveSliceUs = 100'000;
// So long a member that others may ask to withdraw an arrival listens to them, though it has nothing in flight: what
// makes them ask reaches all members at about the same time.
inline constexpr int64_t kServeUs = 2'000'000;

// -- what the coordinator is told -------------------------------------------------------------------------------------
// The driver looks so often how long operations have been in flight by now.
inline constexpr int64_t kWatchUs = 200'000;
// An operation that has been in flight this long is reported: it may be part of a deadlock. Half a second is no time
// for a rank that is only late.
inline constexpr int64_t kBlockedAfterUs = 500'000;
// A report is repeated this often: only a report that is newer than what contradicts it counts.
inline constexpr int64_t kBlockedAgainUs = 1'000'000;
// Of operations for which no thread waits, this many are reported at a time, the oldest first.
inline constexpr size_t kMostTold = 8;

// -- ends -------------------------------------------------------------------------------------------------------------
// A peer tells on its first connection why it ends. When another connection ends before that frame has come, so long it
// may still be on its way.
inline constexpr int64_t kBrokenGraceUs = 200'000;
// What a peer agreed to before it left, or why it left, may still be on its way for so long.
inline constexpr int64_t kDepartureGraceUs = 1'000'000;
// NCCL reports a lost peer, whose process may not have ended yet: so long it may take until the data plane can say who
// it was. With kPeerCheckUs everybody knows within a second.
inline constexpr int64_t kNcclGraceUs = 700'000;
// close() waits so long for operations that all ranks have agreed on, and for NCCL's own end.
inline constexpr int64_t kCloseUs = 1'000'000;
// While it waits for the driver to let go, close() wakes it so often, or looks so often whether it has.
inline constexpr int64_t kCloseWakeUs = 50'000;
inline constexpr int64_t kCloseLookUs = 1'000;
// So long the last thread of an aborted epoch tries to send the reason to peers whose sockets are full.
inline constexpr int64_t kFarewellUs = 1'000'000;
// So long the end of an epoch waits for copies on a device, which write to tensors. They end by themselves, unless the
// device stands still.
inline constexpr int64_t kDeviceEndUs = 5'000'000;

// -- the timeline -----------------------------------------------------------------------------------------------------
// Its events are written so often: a file that is watched grows, and a crash loses no more than that.
inline constexpr int64_t kTimelineWriteUs = 100'000;
// So long stop_timeline() waits for a file system that does not take the rest of the file.
inline constexpr int64_t kTimelineEndUs = 10'000'000;

}  // namespace horovod::limits
