// How small data is written into the order log's frames: records of an id and the bytes that belong to it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/status.h"

namespace horovod::mesh {

// Bytes of a record beside its contents.
inline constexpr size_t kRecordOverhead = 2 * sizeof(uint32_t);

void append_record(std::string& text, uint32_t id, std::string_view bytes);

// Cuts the first record off `text`. Fails when there is no whole one; `sender` is for the sentence.
Status next_record(int sender, std::string_view& text, uint32_t& id, std::string_view& bytes);

}  // namespace horovod::mesh
