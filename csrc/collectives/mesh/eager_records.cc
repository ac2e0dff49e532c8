#include "collectives/mesh/eager_records.h"

#include <cstring>

namespace horovod::mesh {
namespace {

struct Head {
  uint32_t id;
  uint32_t length;
};
static_assert(sizeof(Head) == kRecordOverhead);

}  // namespace

void append_record(std::string& text, uint32_t id, std::string_view bytes) {
  const Head head{id, static_cast<uint32_t>(bytes.size())};
  text.append(reinterpret_cast<const char*>(&head), sizeof(head));
  text.append(bytes);
}

Status next_record(int sender, std::string_view& text, uint32_t& id, std::string_view& bytes) {
  Head head{};
  const bool whole = text.size() >= sizeof(head);
  if (whole) std::memcpy(&head, text.data(), sizeof(head));
  if (!whole || head.length > text.size() - sizeof(head)) {
    return {Code::aborted, error_code::unexpected_data,
            "Rank " + std::to_string(sender) + " of the mesh sent small data that is cut off; this world ends."};
  }
  id = head.id;
  bytes = text.substr(sizeof(head), head.length);
  text.remove_prefix(sizeof(head) + head.length);
  return {};
}

}  // namespace horovod::mesh
