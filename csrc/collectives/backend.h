// Somebody else's algorithms, in place of our own: what backends/ provides and topology.h calls.
#pragma once

#include "collectives/batch.h"

namespace horovod {

class Backend {
 public:
  virtual ~Backend() = default;

  // Runs a batch (operations of equal type, dtype and factors) to its end on this member. Never throws.
  virtual Status run(Batch batch) = 0;
};

// Algorithms for tensors on a device. run() returns when everything is queued there and sets each operation's
// on_device->finished; the tensors are in use until that has passed. The dtypes of a batch may differ.
class DeviceBackend : public Backend {
 public:
  // In the submitting thread: sets on_device->ready.
  virtual Status mark_ready(Operation& operation) = 0;

  // What a member that has joined contributes: a span of zeros and room for a result, for each tensor of
  // operation.spec.
  virtual Status add_zeros(Operation& operation) = 0;

  // Whether anything that was queued has not passed, as far as tend() knows. Any thread.
  virtual bool busy() const = 0;
  // The driver calls it again and again while it is busy: finds out what has passed, and what has failed since.
  virtual Status tend() = 0;

  // The end of the epoch: what runs on the device is ended, also where it waits for a lost member, and its tensors are
  // not touched again. Nothing can be run after it. Any thread; may take a while.
  virtual void abort() = 0;
  // The orderly end, when nothing is busy. Later calls of either do nothing.
  virtual void close() = 0;
};

}  // namespace horovod
