#include "core/check.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <vector>

#include "core/error.h"
#include "rules/dtype.h"

namespace tessera::core {
namespace {

constexpr int64_t longest = (int64_t{1} << 31) - 1;  // cu_seqlens are int32
constexpr int64_t farthest = int64_t{1} << 58;       // elements; bytes and sums of two stay inside int64

void check_sizes(const Problem& p) {
  const auto within = [](const char* name, int64_t value, int64_t least) {
    require(value >= least && value <= longest, "{} is {}; it must be from {} to {}.", name, value, least, longest);
  };
  within("batch", p.batch, 0);
  within("heads_q", p.heads_q, 1);
  within("heads_kv", p.heads_kv, 1);
  within("len_q", p.len_q, 0);
  within("len_k", p.len_k, 0);
  within("dim", p.dim, 1);
  within("dim_v", p.dim_v, 1);
  within("rows_q", p.rows_q, 0);
  within("rows_k", p.rows_k, 0);
  within("len_new", p.len_new, 0);
  within("rows_new", p.rows_new, 0);
  require(
      p.heads_q % p.heads_kv == 0,
      "heads_q is {} and heads_kv is {}; query heads must divide into equal groups. Use a heads_kv that divides {}.",
      p.heads_q, p.heads_kv, p.heads_q);
  require(p.pass != TESSERA_APPEND || p.heads_q == p.heads_kv,
          "heads_q is {} and heads_kv is {}; an append has no queries. Set both to the number of KV heads.", p.heads_q,
          p.heads_kv);
  require(p.rows_q == 0 || packed_q(p), "rows_q is {} but q is not packed; declare cu_seqlens_q or leave rows_q 0.",
          p.rows_q);
  require(p.rows_k == 0 || packed_k(p), "rows_k is {} but k is not packed; declare cu_seqlens_k or leave rows_k 0.",
          p.rows_k);
  const double dense = static_cast<double>(p.batch) * static_cast<double>(std::max({p.len_q, p.len_k, p.len_new}));
  const double rows =
      std::max(dense, static_cast<double>(std::max({p.rows_q, p.rows_k, p.rows_new}))) * static_cast<double>(p.heads_q);
  require(rows < 0x1p56, "batch * heads_q * length is {:.3g}; it must stay below 2^56. Split the batch.", rows);
  require(p.dropout == 0 || static_cast<double>(p.batch) * static_cast<double>(p.heads_q) < 0x1p32,
          "batch * heads_q is {} x {}; dropout counts them in 32 bits. Split the batch.", p.batch, p.heads_q);
  require(p.alignment >= 0 && (p.alignment & (p.alignment - 1)) == 0,
          "alignment is {}; it must be a power of two in bytes, or 0 for 16.", p.alignment);
}

void check_numbers(const Problem& p) {
  require(!p.has_scale || std::isfinite(p.scale), "scale is {}; it must be finite. Clear has_scale for 1/sqrt(dim).",
          p.scale);
  require(std::isfinite(p.softcap) && p.softcap >= 0, "softcap is {}; it must be finite and positive, or 0 for none.",
          p.softcap);
  // Engines compute in the accumulation type, so what they multiply by must be a number there.
  const bool f64 = accumulation_dtype(p) == TESSERA_F64;
  const double most = f64 ? std::numeric_limits<double>::max() : std::numeric_limits<float>::max();
  const double least = f64 ? std::numeric_limits<double>::min() : std::numeric_limits<float>::min();
  require(!p.has_scale || std::abs(p.scale) <= most, "scale is {}; it must fit {}, at most {:.4g}. Scale q instead.",
          p.scale, f64 ? "f64" : "f32", most);
  require(
      p.softcap == 0 || (p.softcap <= most && p.softcap >= least && 1 / p.softcap >= least && 1 / p.softcap <= most),
      "softcap is {}; it and its inverse must fit {}. Use a softcap from {:.4g} to {:.4g}.", p.softcap,
      f64 ? "f64" : "f32", std::max(least, 1 / most), std::min(most, 1 / least));
  require(p.dropout >= 0 && p.dropout < 1, "dropout is {}; it must be at least 0 and below 1.", p.dropout);
}

void check_mask(const Problem& p) {
  const tessera_mask& m = p.mask;
  require(m.corner >= TESSERA_CORNER_UNSET && m.corner <= TESSERA_CORNER_AT,
          "mask.corner is {}; it must be a tessera_corner (0 to 3).", m.corner);
  require(m.corner != TESSERA_CORNER_UNSET || !needs_corner(p),
          "mask.corner is unset, but causal, window, chunk, prefix, slopes and rotary depend on it. Say bottom_right, "
          "top_left or "
          "at.");
  require(m.corner != TESSERA_CORNER_AT || (m.corner_at >= INT32_MIN && m.corner_at <= INT32_MAX),
          "mask.corner_at is {}; like corner_offsets it must fit an int32.", m.corner_at);
  require(!(m.causal && m.has_prefix),
          "mask says causal and prefix({}); a prefix already is causal past its keys. Say prefix alone.", m.prefix);
  require(!m.has_prefix || m.prefix >= 0, "mask.prefix is {}; it must be at least 0.", m.prefix);
  require(m.chunk >= 0, "mask.chunk is {}; it must be at least 1, or 0 for none.", m.chunk);
  require(m.first >= 0, "mask.first is {}; it must be at least 1, or 0 for none.", m.first);
  require(m.first == 0 || m.has_window,
          "mask.first is {} without a window; without one every key is kept already. Add a "
          "window or drop first.",
          m.first);
  require(!has(p, TESSERA_CORNER_OFFSETS) || m.corner == TESSERA_CORNER_AT,
          "corner_offsets is given but mask.corner is {}; say at (3), or leave corner_offsets out.", m.corner);
  require(has(p, TESSERA_DOCUMENTS_Q) == has(p, TESSERA_DOCUMENTS_K),
          "only one of documents_q and documents_k is given; a document mask needs both.");
}

constexpr const char* pass_text[] = {"forward", "backward", "append"};

const char* data_name(const Problem& p) {  // the operand whose dtype is the problem's
  return p.pass == TESSERA_APPEND ? "k_new" : "q";
}

std::string dtype_rule(const Problem& p, const OperandRow& row, int32_t dtype) {
  const bool is_float = dtype >= TESSERA_F64 && dtype <= TESSERA_F16;
  const auto text = [](int32_t d) { return std::string(rules::dtype_rows[d].text); };
  const auto exactly = [&](int32_t d) { return dtype == d ? "" : "it must be " + text(d); };
  switch (row.kind) {
    case Kind::data:
    case Kind::any_float:
      return is_float ? "" : "it must be f64, f32, bf16 or f16";
    case Kind::stored:
      if (dtype == TESSERA_E4M3 && p.pass != TESSERA_BACKWARD) return "";
      [[fallthrough]];
    case Kind::like_q:
      return dtype == data_dtype(p) ? "" : "it must be " + std::string(data_name(p)) + "'s, " + text(data_dtype(p));
    case Kind::angle:
      if (dtype == data_dtype(p) || dtype == TESSERA_F32) return "";
      return "it must be " + std::string(data_name(p)) + "'s, " + text(data_dtype(p)) + ", or f32";
    case Kind::result:
      if (dtype == data_dtype(p) || dtype == accumulation_dtype(p)) return "";
      return "it must be q's, " + text(data_dtype(p)) + ", or the accumulation type, " + text(accumulation_dtype(p));
    case Kind::accumulation:
      return exactly(accumulation_dtype(p));
    case Kind::boolean:
      return exactly(TESSERA_BOOL);
    case Kind::i32:
      return exactly(TESSERA_I32);
    case Kind::as_partner: {
      const int32_t partner = operand(p, row.partner).dtype;
      return dtype == partner ? ""
                              : "it must be " + std::string(operand_row(row.partner).text) + "'s, " + text(partner);
    }
  }
  return "";
}

constexpr const char* token_dims[] = {"batch", "sequence", "head", "dim"};
constexpr const char* grid_dims[] = {"batch", "head", "query", "key"};

void check_extents(const Problem& p, const OperandRow& row, const Operand& o) {
  const bool grid = row.partner == TESSERA_BIAS || row.partner == TESSERA_KEEP;
  const bool everywhere = grid || row.name == TESSERA_K_SCALE || row.name == TESSERA_V_SCALE;
  for (int d = 0; d < 4; ++d) {
    const int64_t full = full_extent(p, row, d);
    const bool may_be_1 = row.broadcasts && (everywhere || d == 0);  // slopes and cache_lens: over the batch alone
    const bool fits = o.extent[d] == full || (may_be_1 && o.extent[d] == 1);
    require(fits, "{}.extent[{}] ({}) is {}; it must be {}{}. Pass the tensor that belongs to this problem.", row.text,
            d, (grid ? grid_dims : token_dims)[d], o.extent[d], may_be_1 && full != 1 ? "1 or " : "", full);
  }
  check_strides(row.text, o);
  if (row.partner != row.name && row.kind == Kind::as_partner)
    for (int d = 0; d < 4; ++d)
      require(o.extent[d] == operand(p, row.partner).extent[d],
              "{}.extent[{}] is {} and {}'s is {}; they must be equal.", row.text, d, o.extent[d],
              operand_row(row.partner).text, operand(p, row.partner).extent[d]);
}

void check_operands(const Problem& p) {
  for (int name = TESSERA_NAMES; name < TESSERA_NAME_CAPACITY; ++name)
    require(!has(p, name), "operand[{}] is given; this library knows {} operands. Use a newer library.", name,
            static_cast<int>(TESSERA_NAMES));
  for (int name = 0; name < TESSERA_NAMES; ++name) {
    const OperandRow& row = operand_row(name);
    const Role r = role(p, name);
    const int32_t dtype = operand(p, name).dtype;
    require(dtype >= 0 && dtype < rules::dtype_count, "{}.dtype is {}; it must be a tessera_dtype (0 to {}).", row.text,
            dtype, rules::dtype_count - 1);
    if (!has(p, name)) {
      require(r != Role::needed_input && r != Role::needed_output, "{} is absent; {} needs it. Declare it.", row.text,
              pass_text[p.pass]);
      continue;
    }
    require(r != Role::none, "{} is given; {} has no use for it. Leave it out.", row.text, pass_text[p.pass]);
    require(row.kind != Kind::as_partner || has(p, row.partner), "{} is given without {}; give both or neither.",
            row.text, operand_row(row.partner).text);
    const std::string rule = dtype_rule(p, row, dtype);
    require(rule.empty(), "{}.dtype is {}; {}. Convert it.", row.text, rules::dtype_rows[dtype].text, rule);
    check_extents(p, row, operand(p, name));
    if (is_written(r)) check_places(row.text, operand(p, name));
    if (row.kind == Kind::i32 && row.axes[1] == Axis::one)  // not documents, not the page table
      require(operand(p, name).extent[0] <= 1 || operand(p, name).stride[0] == 1,
              "{}.stride[0] is {}; lists of lengths must be dense. Copy it.", row.text, operand(p, name).stride[0]);
  }
  if (p.pass == TESSERA_BACKWARD) {
    bool any = false;
    for (int name = 0; name < TESSERA_NAMES; ++name) any = any || (is_output(role(p, name)) && has(p, name));
    require(any,
            "no gradient is declared; backward would compute nothing. Declare dq, dk, dv, dbias, dslopes or dsinks.");
  }
}

}  // namespace

void check_strides(const char* text, const Operand& o) {
  for (int d = 0; d < 4; ++d)
    require(o.extent[d] <= 1 || (o.stride[d] >= 0 && o.stride[d] <= farthest / o.extent[d]),
            "{}.stride[{}] is {}; over {} elements it must stay from 0 to 2^58. Copy the tensor.", text, d, o.stride[d],
            o.extent[d]);
  require(span(o) <= farthest, "{} spans {} elements; it must stay below 2^58. Copy the tensor.", text, span(o));
}

void check_places(const char* text, const Operand& o) {
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, extent
  for (int d = 0; d < 4; ++d) {
    if (o.extent[d] == 0) return;
    if (o.extent[d] > 1) dims.emplace_back(o.stride[d], o.extent[d]);
  }
  // Sorted by stride, each dimension must step over all that the smaller ones reach.
  std::sort(dims.begin(), dims.end());
  int64_t reach = 1;
  for (const auto& [stride, extent] : dims) {
    require(
        stride >= reach,
        "{} has stride {} over {} elements; elements of an output must not share addresses, so it must be at least {}. "
        "Give {} its own memory.",
        text, stride, extent, reach, text);
    reach += (extent - 1) * stride;
  }
}

bool needs_corner(const Problem& p) {
  const tessera_mask& m = p.mask;
  return m.causal || m.has_window || m.has_prefix || m.chunk || has(p, TESSERA_SLOPES) ||
         (p.cache.rotary_dim > 0 && p.pass != TESSERA_APPEND);
}

void check(const Problem& p) {
  require(p.pass >= TESSERA_FORWARD && p.pass <= TESSERA_APPEND,
          "pass is {}; it must be forward (0), backward (1) or append (2).", p.pass);
  check_sizes(p);
  check_cache_sizes(p);
  check_numbers(p);
  check_mask(p);
  check_operands(p);
  check_cache(p);
}

}  // namespace tessera::core
