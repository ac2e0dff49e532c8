#include "engine/lane_table.h"

#include <algorithm>
#include <string_view>
#include <utility>

namespace horovod {
namespace {

NameEntry::Variant* variant_of(NameEntry& entry, const OpSpec& spec) {
  for (NameEntry::Variant& known : entry.variants) {
    if (known.lanes[0]->spec.agrees_with(spec)) return &known;
  }
  return nullptr;
}

// Whether the name ends in a number that an engine gives to an unnamed operation, as "allreduce.noname.7" and
// "allreduce.jit.noname.7" do. The coordinator has the same rule.
bool is_number(const std::string& name) {
  const size_t number = name.find_last_not_of("0123456789") + 1;
  return number < name.size() && std::string_view(name).substr(0, number).ends_with(".noname.");
}

bool has_operations(const NameEntry& entry) {
  const auto runs = [](const std::unique_ptr<Lane>& lane) { return lane->users > 0; };
  return std::any_of(entry.variants.begin(), entry.variants.end(), [&](const NameEntry::Variant& one) {
    return std::any_of(one.lanes.begin(), one.lanes.end(), runs);
  });
}

bool is_in_use(const Lane& lane) { return lane.users > 0 || lane.id != Lane::kNoId || lane.next_id != Lane::kNoId; }

}  // namespace

bool LaneTable::enter(Submission& submission) {
  NameEntry& entry = names_[submission.spec.name];
  if (entry.variants.empty()) entry.unnamed = submission.spec.name.ends_with(".noname");
  if (entry.in_flight) return false;
  entry.in_flight = !entry.unnamed;
  submission.entry = &entry;
  submission.lane = &lane_for(entry, submission.spec);
  ++submission.lane->users;
  if (entry.unnamed) submission.unnamed = entry.submitted++;
  return true;
}

void LaneTable::leave(Submission& submission) {
  if (submission.entry) submission.entry->in_flight = false;
  --submission.lane->users;
  forget_if_unused(*submission.lane);
}

Lane& LaneTable::lane_for(NameEntry& entry, const OpSpec& spec) {
  NameEntry::Variant* variant = variant_of(entry, spec);
  if (!variant) {
    if (entry.unnamed && entry.variants.size() >= kUnnamedVariants) make_room(entry);
    variant = &entry.variants.emplace_back();
  }
  variant->latest = entry.submitted;
  // The lane depends on the number of earlier operations only, so all members choose alike.
  const size_t index = entry.unnamed ? variant->submitted++ % kUnnamedLanes : 0;
  if (index == variant->lanes.size()) variant->lanes.emplace_back(std::make_unique<Lane>())->spec = spec;
  return *variant->lanes[index];
}

// All members lose an id at the same time, by a recall. The count of unnamed operations ends in make_room() only.
void LaneTable::forget_if_unused(Lane& lane) {
  if (is_in_use(lane) || retired_.erase(&lane) > 0) return;
  const auto found = names_.find(lane.spec.name);
  if (found == names_.end() || found->second.unnamed) return;
  std::vector<NameEntry::Variant>& variants = found->second.variants;
  std::erase_if(variants, [&](const NameEntry::Variant& one) { return one.lanes[0].get() == &lane; });
  if (variants.empty()) names_.erase(found);
}

// Forgets the signature that was used longest ago. All members do so at the same operation, since they start unnamed
// operations in the same order; a lane that is in use is kept until it is not, and its id until it is recalled.
void LaneTable::make_room(NameEntry& entry) {
  const auto oldest = std::min_element(entry.variants.begin(), entry.variants.end(),
                                       [](const auto& a, const auto& b) { return a.latest < b.latest; });
  for (std::unique_ptr<Lane>& lane : oldest->lanes) {
    if (!is_in_use(*lane)) continue;
    const Lane* const key = lane.get();
    retired_.emplace(key, std::move(lane));
  }
  entry.variants.erase(oldest);
}

std::vector<TensorId> LaneTable::forget_unnamed() {
  std::vector<TensorId> ids;
  const auto add = [&](const Lane& lane) {
    for (const TensorId id : {lane.id, lane.next_id}) {
      if (id != Lane::kNoId) ids.push_back(id);
    }
  };
  std::erase_if(names_, [&](const auto& named) {
    const auto& [name, entry] = named;
    if ((!entry.unnamed && !is_number(name)) || has_operations(entry)) return false;
    for (const NameEntry::Variant& variant : entry.variants) {
      for (const std::unique_ptr<Lane>& lane : variant.lanes) add(*lane);
    }
    return true;
  });
  for (const auto& [key, lane] : retired_) add(*lane);
  retired_.clear();
  return ids;
}

size_t LaneTable::size() const {
  size_t lanes = retired_.size();
  for (const auto& [name, entry] : names_) {
    for (const NameEntry::Variant& variant : entry.variants) lanes += variant.lanes.size();
  }
  return lanes;
}

}  // namespace horovod
