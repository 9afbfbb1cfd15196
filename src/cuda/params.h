// What launches are told: parts that kernels make the same way, and all of a general kernel's.
#pragma once
#include "core/plan.h"
#include "rules/params.h"
#include "rules/spec.h"

namespace tessera::cuda {

rules::GeneralParams general_params(const core::Plan& plan, const core::Bindings& bound);  // its Cut is the step's
rules::ForwardParams forward_params(const core::Plan& plan, const core::Bindings& bound);
rules::CacheParams cache_params(const core::Problem& p, const core::Bindings& bound);
rules::DeviceLengths fresh_lengths(const core::Problem& p, const core::Bindings& bound);  // of new tokens
bool has_pairs(const core::Problem& p);                                                   // a bias or a keep mask
rules::Float float_of(const core::Problem& p);                                            // of bf16 and f16

rules::Steps steps_of(const core::Problem& p, int name);  // 0 where a dimension has one element
rules::DeviceLengths query_lengths(const core::Problem& p, const core::Bindings& bound);
rules::DeviceLengths key_lengths(const core::Problem& p, const core::Bindings& bound);
struct CornerParams {
  rules::Corner corner;
  const int* offsets;
  rules::BandMask band;
};
CornerParams corner_params(const core::Problem& p, const core::Bindings& bound);
double scale_of(const core::Problem& p);
template <class T>
T* data_of(const core::Problem& p, const core::Bindings& bound, int name) {  // nullptr: absent
  return core::has(p, name) ? static_cast<T*>(bound.data[name]) : nullptr;
}
template <class T>
T* region_of(const core::Plan& plan, const core::Bindings& bound, const char* name) {  // nullptr: the plan has none
  for (const core::Region& r : plan.regions)
    if (r.name == name) return reinterpret_cast<T*>(static_cast<std::byte*>(bound.workspace) + r.offset);
  return nullptr;
}

}  // namespace tessera::cuda
