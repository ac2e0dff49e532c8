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

}  // namespace horovod
