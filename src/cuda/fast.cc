#include "cuda/fast.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "cuda/launch.h"
#include "cuda/params.h"
#include "rules/dtype.h"

namespace tessera::cuda {
namespace {

using core::Device;
using core::Operand;
using core::Problem;

struct Option {
  int name;
  const char* text;
};
constexpr Option options[] = {{TESSERA_EXCLUDE_KEYS, "excluded keys"},
                              {TESSERA_DOCUMENTS_Q, "documents"},
                              {TESSERA_SLOPES, "ALiBi slopes"},
                              {TESSERA_SINKS, "sinks"}};

}  // namespace

std::string refuse_fast(const Problem& p, const Device& device) {
  if (device.kind != TESSERA_GPU)
    return fmt::format("device {} is a processor, the kernel runs on NVIDIA GPUs", device.name);
  if (device.sm_arch < 80)
    return fmt::format("device {} is sm_{}; the kernel's instructions begin with sm_80", device.name, device.sm_arch);
  const int32_t dtype = core::data_dtype(p);
  if (dtype != TESSERA_BF16 && dtype != TESSERA_F16)
    return fmt::format("its products are bf16 or f16, q is {}", rules::dtype_rows[dtype].text);
  if (core::has(p, TESSERA_MAX_SCORE)) return "it has no max_score";
  if (rules::hulls_have_gaps(core::band_mask(p, 0, 0)))
    return "the window lies off the diagonal; some keys inside a tile may be seen by no row";
  if (std::max(p.len_q, p.len_k) > longest_sequence)
    return fmt::format("a sequence is longer than {}", longest_sequence);
  return "";
}

std::string refuse_options(const Problem& p) {
  for (const Option& option : options)
    if (core::has(p, option.name)) return fmt::format("it has no {}", option.text);
  if (p.softcap != 0) return "it has no softcap";
  if (p.dropout != 0) return "it has no dropout";
  return "";
}

std::string refuse_forward(const Problem& p, const Device& device) {
  if (p.pass != TESSERA_FORWARD)
    return p.pass == TESSERA_BACKWARD ? "it attends forward only" : "an append has no products";
  if (std::string why = refuse_fast(p, device); !why.empty()) return why;
  for (const int name : {TESSERA_K, TESSERA_V})
    if (core::operand(p, name).dtype != core::data_dtype(p))
      return fmt::format("{} is {}, the kernel reads q's dtype", core::operand_row(name).text,
                         rules::dtype_rows[core::operand(p, name).dtype].text);
  if (p.batch_invariant) return "it does not answer every chunk of a sequence, and another kernel has other bits";
  return "";
}

std::string refuse_cache(const Problem& p) {
  if (core::is_cache(p) || core::appends(p)) return "k and v are a cache; it reads tensors";
  return p.cache.rotary_dim ? "it rotates nothing" : "";
}

std::string refuse_scale(const Problem& p) {
  const double scale_log2 = scale_of(p) * M_LOG2E;
  return scale_log2 >= 0x1p-126 && scale_log2 <= 0x1p126
             ? ""
             : fmt::format("scale is {}; it must be above 0 and moderate", scale_of(p));
}

std::string refuse_shared(int bytes, const Device& device) {
  return device.shared_per_block >= bytes ? ""
                                          : fmt::format("a block needs {} bytes of shared memory, device {} has {}",
                                                        bytes, device.name, device.shared_per_block);
}

std::string refuse_rows(const Problem& p, std::span<const int> names) {
  for (const int name : names) {
    if (!core::has(p, name)) continue;
    const Operand& o = core::operand(p, name);
    const char* const text = core::operand_row(name).text;
    if (o.extent[3] > 1 && o.stride[3] != 1)
      return fmt::format("{} has stride {} along its dim; the kernel copies rows 16 bytes at a time", text,
                         o.stride[3]);
    for (int d = 0; d < 3; ++d)
      if (o.extent[d] > 1 && o.stride[d] * core::dtype_bytes(o.dtype) % 16)
        return fmt::format("{}.stride[{}] is {}; the kernel needs rows at multiples of 16 bytes", text, d, o.stride[d]);
  }
  if (p.alignment && p.alignment < 16)
    return fmt::format("pointers are promised at multiples of {} bytes, the kernel needs 16", p.alignment);
  return "";
}

void check_rows(const Problem& p, const core::Bindings& bound, std::span<const int> names) {
  for (const int name : names) {
    if (!core::has(p, name)) continue;
    const auto address = reinterpret_cast<uintptr_t>(bound.data[name]);
    core::require(address % 16 == 0,
                  "{} is at address {:#x}; the problem promised multiples of {} bytes. Copy it, or say its alignment.",
                  core::operand_row(name).text, address, p.alignment ? p.alignment : 16);
  }
}

}  // namespace tessera::cuda
