// The small data that travels with the order log's frames: how it is written, and where it waits for its batch.
//
// A contribution belongs to one run of an id, counted by the id's generation (how many batches with it came before),
// which every member knows when it arrives. So what was sent with an arrival that was taken back, or came for a batch
// that ran without it, is recognised and dropped.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace horovod::mesh {

// The record of one contribution: id, generation, length, bytes.
void append_contribution(std::string& text, uint32_t id, uint32_t generation, std::string_view bytes);

class EagerStore {
 public:
  struct Contribution {
    int sender;
    uint32_t generation;
    std::string bytes;
  };

  explicit EagerStore(uint32_t ids) : by_id_(ids) {}

  // Keeps the contributions in `text`; appends their ids to `ids` unless it is null. Fails when the text is malformed.
  Status take(int sender, std::string_view text, std::vector<uint32_t>* ids);

  // Null when it is not there.
  const std::string* find(uint32_t id, int sender, uint32_t generation) const;

  // Drops all of an id up to and with this generation.
  void drop(uint32_t id, uint32_t generation);

 private:
  std::vector<std::vector<Contribution>> by_id_;  // few at a time for each id
};

}  // namespace horovod::mesh
