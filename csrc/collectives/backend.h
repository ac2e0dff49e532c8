// Algorithms of another library that take the place of our own. backends/ provides them and topology.h calls them.
#pragma once

#include "collectives/batch.h"

namespace horovod {

class Backend {
 public:
  virtual ~Backend() = default;

  // Whether the backend runs operations of this type; our own algorithms run the others.
  virtual bool has(OpType type) const = 0;
  // Runs a batch (operations of equal type, dtype and factors) to its end on this member. Never throws.
  virtual Status run(Batch batch) = 0;
};

// Runs batches whose tensors are on a device. run() returns when everything is queued on the device, and sets each
// operation's on_device->finished; the tensors are in use until that event has passed. When run() fails, they are in
// use until abort() has returned.
class DevicePath : public Backend {
 public:
  // Whether, by the last look of tend(), work is queued on the device that has not passed. Any thread.
  virtual bool busy() const = 0;
  // Finds out which work has passed or failed. The driver calls it again and again while busy().
  virtual Status tend() = 0;
  // Whether work that was queued before has failed. A batch that waits on the host calls this again and again from
  // within run(), as such a failure may be the reason why its wait does not end.
  virtual Status watch() = 0;

  // To be called at the end of the epoch: ends the work on the device that waits for other members, whose tensors are
  // not touched again. No batch can be run after it. Any thread; may take a while.
  virtual void abort() = 0;
  // The orderly end, to be called when no work is under way. Later calls of close() or abort() do nothing.
  virtual void close() = 0;
};

// The interface for a communicator, which chooses between device paths. The dtypes of a batch may differ. When run()
// fails, the tensors are not in use any more.
class DeviceBackend : public DevicePath {
 public:
  // Called in the submitting thread: refuses an operation that can't be run, or sets its on_device->ready.
  virtual Status mark_ready(Operation& operation) = 0;

  // Gives the operation what a member that has joined contributes: a span of zeros, and room for a result, for each
  // tensor of operation.spec.
  virtual Status add_zeros(Operation& operation) = 0;

  // Whether NCCL runs such a batch; if not, the batch goes through the host's memory. A guess until the first batch has
  // run.
  virtual bool takes_nccl(const OpSpec& spec) const = 0;
};

}  // namespace horovod
