// Algorithms of another library, in place of our own: backends/ provides them and topology.h calls them.
#pragma once

#include "collectives/batch.h"

namespace horovod {

class Backend {
 public:
  virtual ~Backend() = default;

  // Whether it runs operations of this type; those that it does not have run in our own way.
  virtual bool has(OpType type) const = 0;
  // Runs a batch (operations of equal type, dtype and factors) to its end on this member. Never throws.
  virtual Status run(Batch batch) = 0;
};

// A way for batches whose tensors are on a device. run() returns when everything is queued there and sets each
// operation's on_device->finished; the tensors are in use until that has passed. When it fails, they are in use until
// abort() has returned.
class DevicePath : public Backend {
 public:
  // Whether anything that was queued has not passed, as far as tend() knows. Any thread.
  virtual bool busy() const = 0;
  // The driver calls it again and again while it is busy: finds out what has passed, and what has failed since.
  virtual Status tend() = 0;
  // Whether anything that was queued before has failed. A batch that waits on the host calls this again and again from
  // within run(): such a failure may be the reason why its wait does not end.
  virtual Status watch() = 0;

  // The end of the epoch: what runs on the device and waits for other members is ended, and its tensors are not touched
  // again. Nothing can be run after it. Any thread; may take a while.
  virtual void abort() = 0;
  // The orderly end, when nothing is busy. Later calls of either do nothing.
  virtual void close() = 0;
};

// What a communicator sees: the choice between such ways. The dtypes of a batch may differ. When run() fails, nothing
// uses the tensors any more.
class DeviceBackend : public DevicePath {
 public:
  // In the submitting thread: refuses what can't be run, or sets on_device->ready.
  virtual Status mark_ready(Operation& operation) = 0;

  // What a member that has joined contributes: a span of zeros and room for a result, for each tensor of
  // operation.spec.
  virtual Status add_zeros(Operation& operation) = 0;

  // Whether NCCL runs such a batch; otherwise it goes through the host's memory. A guess until the first batch has run.
  virtual bool takes_nccl(const OpSpec& spec) const = 0;
};

}  // namespace horovod
