#include "collectives/mesh/eager_store.h"

#include <cstring>

namespace horovod::mesh {
namespace {

struct Record {
  uint32_t id;
  uint32_t generation;
  uint32_t length;
};

}  // namespace

void append_contribution(std::string& text, uint32_t id, uint32_t generation, std::string_view bytes) {
  const Record record{id, generation, static_cast<uint32_t>(bytes.size())};
  text.append(reinterpret_cast<const char*>(&record), sizeof(record));
  text.append(bytes);
}

Status EagerStore::take(int sender, std::string_view text, std::vector<uint32_t>* ids) {
  while (!text.empty()) {
    Record record{};
    const bool whole = text.size() >= sizeof(record);
    if (whole) std::memcpy(&record, text.data(), sizeof(record));
    if (!whole || record.id >= by_id_.size() || record.length > text.size() - sizeof(record)) {
      return {Code::aborted,
              "Rank " + std::to_string(sender) +
                  " of the mesh sent small data that is cut off or belongs to no id; this epoch can't go on."};
    }
    text.remove_prefix(sizeof(record));
    by_id_[record.id].push_back({sender, record.generation, std::string(text.substr(0, record.length))});
    text.remove_prefix(record.length);
    if (ids) ids->push_back(record.id);
  }
  return {};
}

const std::string* EagerStore::find(uint32_t id, int sender, uint32_t generation) const {
  for (const Contribution& contribution : by_id_[id]) {
    if (contribution.sender == sender && contribution.generation == generation) return &contribution.bytes;
  }
  return nullptr;
}

void EagerStore::drop(uint32_t id, uint32_t generation) {
  std::erase_if(by_id_[id], [generation](const Contribution& contribution) {
    return static_cast<int32_t>(contribution.generation - generation) <= 0;  // generations may wrap
  });
}

}  // namespace horovod::mesh
