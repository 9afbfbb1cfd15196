#include "core/line.h"

#include <algorithm>
#include <charconv>
#include <climits>
#include <filesystem>
#include <fstream>
#include <optional>
#include <set>
#include <sstream>
#include <string_view>

#include "core/check.h"
#include "core/error.h"
#include "core/sequence.h"
#include "rules/dtype.h"

namespace tessera::core {
namespace {

using std::string_view;

constexpr const char* layouts[] = {"bshd", "bhsd", "qkv", "kv"};
constexpr const char* corners[] = {"bottom_right", "top_left", "at"};  // from TESSERA_BOTTOM_RIGHT on
constexpr char grid_letters[] = "bhqk";

// ------------------------------------------------------------------------------------------------------- reading

// One word of the line, read from the left. Every complaint names the word.
struct Reader {
  string_view word, rest;

  explicit Reader(string_view w) : word(w), rest(w) {}

  template <class... Args>
  [[noreturn]] void fail(fmt::format_string<Args...> text, Args&&... args) const {
    invalid("\"{}\": {}", word, fmt::format(text, std::forward<Args>(args)...));
  }
  bool done() const { return rest.empty(); }
  bool take(string_view prefix) {
    if (!rest.starts_with(prefix)) return false;
    rest.remove_prefix(prefix.size());
    return true;
  }
  void expect(string_view prefix) {
    if (!take(prefix)) fail("expected \"{}\" before \"{}\"; see the grammar in ADDING.md.", prefix, rest);
  }
  void finish() const {
    if (!done()) fail("\"{}\" is left over; see the grammar in ADDING.md.", rest);
  }
  template <class T>
  T number(const char* what) {
    T value{};
    const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), value);
    if (error == std::errc::result_out_of_range) fail("{} does not fit its type; give a smaller number.", what);
    if (error != std::errc{}) fail("expected {} before \"{}\".", what, rest);
    rest.remove_prefix(static_cast<size_t>(end - rest.data()));
    return value;
  }
  int64_t integer() { return number<int64_t>("a whole number"); }
  string_view name() {  // letters, digits and _
    size_t n = 0;
    while (n < rest.size() && (std::isalnum(static_cast<unsigned char>(rest[n])) || rest[n] == '_')) ++n;
    const string_view found = rest.substr(0, n);
    rest.remove_prefix(n);
    return found;
  }
  template <size_t N>
  int one_of(const char* const (&choices)[N], const char* what) {
    const string_view found = name();
    for (size_t i = 0; i < N; ++i)
      if (found == choices[i]) return static_cast<int>(i);
    fail("{} is \"{}\"; it must be one of {}.", what, found, fmt::join(choices, ", "));
  }
  int32_t float_dtype() {
    const string_view found = name();
    for (int d = TESSERA_F64; d <= TESSERA_F16; ++d)
      if (found == rules::dtype_rows[d].text) return d;
    fail("dtype is \"{}\"; it must be f64, f32, bf16 or f16.", found);
  }
  int operand_name() {
    // Names are followed by "[" or ","; digits never follow, so the longest match is the name.
    const string_view found = name();
    for (int n = 0; n < TESSERA_NAMES; ++n)
      if (found == operand_row(n).text) return n;
    fail("\"{}\" is not an operand; see the tensor names in ADDING.md.", found);
  }
  std::vector<int64_t> list() {
    expect("[");
    std::vector<int64_t> values;
    if (take("@")) {
      const size_t end = rest.find(']');
      const std::string file(rest.substr(0, end));
      rest.remove_prefix(std::min(end, rest.size()));
      constexpr uintmax_t most = uintmax_t{1} << 26;
      std::error_code unknown;
      const uintmax_t bytes = std::filesystem::file_size(file, unknown);  // an error for what is not a regular file
      if (!unknown && bytes > most) fail("file \"{}\" has {} bytes; lists are read up to {}.", file, bytes, most);
      std::ifstream in(file);
      if (unknown || !in) fail("file \"{}\" cannot be read.", file);
      std::string item;
      while (in >> item) {
        Reader number(item);
        values.push_back(number.integer());
        number.take(",");
        number.finish();
      }
      if (in.bad()) fail("file \"{}\" cannot be read.", file);
    } else if (!rest.starts_with("]")) {
      do values.push_back(integer());
      while (take(","));
    }
    expect("]");
    return values;
  }
  std::vector<int32_t> lengths() {
    std::vector<int32_t> out;
    for (const int64_t v : list()) {
      if (v < INT32_MIN || v > INT32_MAX) fail("{} is out of range; lengths are int32.", v);
      out.push_back(static_cast<int32_t>(v));
    }
    return out;
  }
};

using Lengths = std::optional<std::vector<int32_t>>;
using Dims = std::array<char, 4>;

struct Sides {
  bool said[2] = {false, false};  // q, k
  Lengths values[2];
};
struct Strides {
  int name;
  std::vector<int64_t> values;
};

// The line's words before they become a problem.
struct Words {
  Problem problem = {};
  int32_t dtype = TESSERA_F32;
  int layout = TESSERA_BSHD;
  std::optional<int64_t> batch, len[2], rows[2];
  Sides varlen, seqused;
  Lengths corner_offsets;
  bool per_sequence_corner = false, exclude_keys = false, documents = false, sink = false;
  std::optional<Dims> bias, keep;
  std::optional<int32_t> bias_dtype, out_dtype;
  std::optional<std::string> alibi;
  bool lse = true, max_score = false, dlse = false;
  std::optional<std::vector<int>> grads;
  std::vector<Strides> strides;
  uint64_t seed = 0, offset = 0;
  bool has_dim = false;
};

Dims read_dims(Reader& r) {
  Dims dims = {};
  for (size_t d = 0; d < 4; ++d) {
    if (d) r.expect(",");
    const char letter = grid_letters[d];
    if (r.take("1")) dims[d] = '1';
    else if (r.take(string_view(&letter, 1))) dims[d] = letter;
    else r.fail("dimension {} must be 1 or {}, in the order b,h,q,k.", d + 1, letter);
  }
  return dims;
}

void read_sides(Reader& r, Sides& sides) {
  for (int side = 0; side < 2; ++side) {
    if (!r.take(side ? "k" : "q")) continue;
    sides.said[side] = true;
    if (r.rest.starts_with("[")) sides.values[side] = r.lengths();
  }
  if (!sides.said[0] && !sides.said[1]) r.fail("say q, k or both, as in q[3,5]k[7,5].");
}

void read_corner(Reader& r, Words& w) {
  tessera_mask& m = w.problem.mask;
  if (!r.take("@")) return;
  if (m.corner != TESSERA_CORNER_UNSET) r.fail("the corner is said twice; say it once for the whole mask.");
  m.corner = TESSERA_BOTTOM_RIGHT + r.one_of(corners, "corner");
  if (m.corner != TESSERA_CORNER_AT) return;
  if (r.take("(")) {
    m.corner_at = r.integer();
    r.expect(")");
  } else {
    w.per_sequence_corner = true;
    if (r.rest.starts_with("[")) w.corner_offsets = r.lengths();
  }
}

void read_bound(Reader& r, int32_t& unbounded, int64_t& value) {
  unbounded = r.take("unbounded");
  if (!unbounded) value = r.integer();
}

void read_mask_part(Reader& r, Words& w, std::set<string_view>& said) {
  tessera_mask& m = w.problem.mask;
  const string_view part = r.name();
  if (!said.insert(part).second) r.fail("{} is said twice; say it once.", part);
  const auto argument = [&](const char* what, int64_t least) {
    r.expect("(");
    const int64_t n = r.integer();
    if (n < least) r.fail("{} is {}; it must be at least {}.", what, n, least);
    r.expect(")");
    return n;
  };
  if (part == "none") {
    if (r.rest.starts_with("&") || said.size() > 1) r.fail("none stands alone; drop it or the other parts.");
    return;
  }
  if (part == "first") {
    m.first = argument("first", 1);
  } else if (part == "keep") {
    w.keep = Dims{'1', '1', 'q', 'k'};
    if (r.take("(")) {
      w.keep = read_dims(r);
      r.expect(")");
    }
  } else if (part == "exclude_keys") {
    w.exclude_keys = true;
  } else if (part == "documents") {
    w.documents = true;
  } else {
    if (part == "causal") {
      m.causal = 1;
    } else if (part == "window") {
      m.has_window = 1;
      r.expect("(");
      read_bound(r, m.window_left_unbounded, m.window_left);
      r.expect(",");
      read_bound(r, m.window_right_unbounded, m.window_right);
      r.expect(")");
    } else if (part == "chunk") {
      m.chunk = argument("chunk", 1);
    } else if (part == "prefix") {
      m.has_prefix = 1;
      m.prefix = argument("prefix", 0);
    } else if (part != "corner") {
      r.fail(
          "\"{}\" is not a mask part; it must be none, causal, window, chunk, prefix, corner, first, keep, "
          "exclude_keys "
          "or documents.",
          part);
    }
    read_corner(r, w);
  }
}

void read_option(Reader& r, string_view key, Words& w) {
  Problem& p = w.problem;
  if (key == "layout") {
    w.layout = r.one_of(layouts, "layout");
  } else if (key == "strides") {
    while (!r.done()) {
      const int name = r.operand_name();
      for (const Strides& said : w.strides)
        if (said.name == name) r.fail("{} is said twice; say it once.", operand_row(name).text);
      w.strides.push_back({name, r.list()});
      if (w.strides.back().values.size() != 4)
        r.fail("{} has {} strides; give 4, in elements.", operand_row(name).text, w.strides.back().values.size());
    }
  } else if (key == "mask") {
    std::set<string_view> said;
    do read_mask_part(r, w, said);
    while (r.take("&"));
  } else if (key == "scale") {
    p.has_scale = 1;
    p.scale = r.number<double>("a number");
  } else if (key == "softcap") {
    p.softcap = r.number<double>("a number");
  } else if (key == "alibi") {
    w.alibi = std::string(r.take("b,h") ? "b,h" : "");
  } else if (key == "bias") {
    w.bias = read_dims(r);
    if (r.take(":")) w.bias_dtype = r.float_dtype();
  } else if (key == "dropout") {
    p.dropout = r.number<double>("a number");
    if (r.take("@seed")) w.seed = r.number<uint64_t>("a seed");
    if (r.take("@offset")) w.offset = r.number<uint64_t>("an offset");
  } else if (key == "varlen") {
    read_sides(r, w.varlen);
  } else if (key == "seqused") {
    read_sides(r, w.seqused);
  } else if (key == "rows") {
    if (r.take("q")) w.rows[0] = r.integer();
    if (r.take("k")) w.rows[1] = r.integer();
    if (!w.rows[0] && !w.rows[1]) r.fail("say q, k or both, as in q100k120.");
  } else if (key == "out") {
    w.out_dtype = r.float_dtype();
  } else if (key == "grads") {
    w.grads.emplace();
    do {
      const int name = r.operand_name();
      if (!is_output(operand_row(name).backward)) r.fail("{} is not a gradient.", operand_row(name).text);
      w.grads->push_back(name);
    } while (r.take(","));
  } else if (key == "align") {
    p.alignment = r.integer();
  } else {
    r.fail("\"{}=\" is unknown; see the grammar in ADDING.md.", key);
  }
  r.finish();
}

bool read_flag(string_view word, Words& w) {
  if (word == "alibi") w.alibi = "";
  else if (word == "sink") w.sink = true;
  else if (word == "nolse") w.lse = false;
  else if (word == "max") w.max_score = true;
  else if (word == "dlse") w.dlse = true;
  else if (word == "deterministic") w.problem.deterministic = 1;
  else if (word == "batch_invariant") w.problem.batch_invariant = 1;
  else if (word == "allow_tf32") w.problem.allow_tf32 = 1;
  else return false;
  return true;
}

bool read_size(string_view word, Words& w) {
  Problem& p = w.problem;
  Reader r(word);
  if (word.size() < 2 || !(std::isdigit(static_cast<unsigned char>(word[1])) || word[1] == '-')) return false;
  if (r.take("b")) w.batch = r.integer();
  else if (r.take("q")) w.len[0] = r.integer();
  else if (r.take("k")) w.len[1] = r.integer();
  else if (r.take("h")) {
    p.heads_q = p.heads_kv = r.integer();
    if (r.take("/")) p.heads_kv = r.integer();
  } else if (r.take("d")) {
    p.dim = p.dim_v = r.integer();
    if (r.take("/")) p.dim_v = r.integer();
    w.has_dim = true;
  } else {
    return false;
  }
  r.finish();
  return true;
}

// What may be said once: two words with one key would leave a reader guessing which counts.
std::string key_of(string_view word) {
  const size_t equals = word.find('=');
  if (equals != string_view::npos) return std::string(word.substr(0, equals));
  if (word.size() > 1 && (std::isdigit(static_cast<unsigned char>(word[1])) || word[1] == '-') &&
      string_view("bqkhd").find(word[0]) != string_view::npos)
    return std::string(1, word[0]);
  return std::string(word);
}

bool is_dtype(string_view word) {
  return std::any_of(std::begin(rules::dtype_rows), std::end(rules::dtype_rows),
                     [&](auto& row) { return word == row.text; });
}

// What somebody who wrote this word may have meant.
std::string hint(string_view word) {
  const string_view stem = word.substr(0, word.find_first_of("(@&"));
  for (const string_view part : {"causal", "window", "chunk", "prefix", "first", "keep", "exclude_keys", "documents"})
    if (stem == part) return fmt::format("parts of the mask are said as mask={}.", word);
  for (const string_view option : {"layout", "strides", "mask", "scale", "softcap", "bias", "dropout", "varlen",
                                   "seqused", "rows", "out", "grads", "align"})
    if (stem == option)
      return fmt::format("{} takes a value, as in {}=...; see the grammar in ADDING.md.", option, option);
  if (word.size() == 1 && string_view("bqkhd").find(word[0]) != string_view::npos)
    return fmt::format("{0} takes a whole number, as in {0}64.", word);
  return "a word is a dtype (f64, f32, bf16, f16), a size (b4 h32/8 q512 k512 d64), an option or key=value; see the "
         "grammar in ADDING.md.";
}

Words read_words(const std::string& text) {
  Words w;
  w.problem.size = sizeof(Problem);
  w.problem.heads_q = w.problem.heads_kv = 1;
  std::istringstream in(text.substr(0, text.find('#')));
  std::string word;
  if (!(in >> word)) invalid("the line is empty; it begins with forward or backward.");
  if (word == "backward") w.problem.pass = TESSERA_BACKWARD;
  else if (word != "forward") invalid("\"{}\": a line begins with forward or backward.", word);
  std::set<std::string> said;
  bool has_dtype = false;
  while (in >> word) {
    require(said.insert(key_of(word)).second, "\"{}\": {} is said twice; say it once.", word, key_of(word));
    const size_t equals = word.find('=');
    Reader r(word);
    if (equals != std::string::npos) {
      r.rest.remove_prefix(equals + 1);
      read_option(r, string_view(word).substr(0, equals), w);
    } else if (!read_flag(word, w) && !read_size(word, w)) {
      if (!is_dtype(word)) r.fail("unknown; {}", hint(word));
      require(!has_dtype, "\"{}\": the dtype is said twice; say it once.", word);
      has_dtype = true;
      w.dtype = r.float_dtype();
    }
  }
  require(w.has_dim, "the head dim is not said; add d and a number, as in d64.");
  return w;
}

// ------------------------------------------------------------------------------------------------------ building

// Batch, lengths and rows from what is said and what the lists imply.
void build_sizes(Words& w, Line& line) {
  Problem& p = line.problem;
  const auto batch_from = [&](const Lengths& list, const char* what) {
    if (!list) return;
    const auto n = static_cast<int64_t>(list->size());
    if (!w.batch) w.batch = n;
    require(*w.batch == n, "{} gives {} sequences and the batch is {}; they must agree.", what, n, *w.batch);
  };
  for (int side = 0; side < 2; ++side) batch_from(w.varlen.values[side], side ? "varlen=k" : "varlen=q");
  for (int side = 0; side < 2; ++side) batch_from(w.seqused.values[side], side ? "seqused=k" : "seqused=q");
  batch_from(w.corner_offsets, "@at");
  p.batch = w.batch.value_or(1);
  for (int side = 0; side < 2; ++side) {
    const char letter = side ? 'k' : 'q';
    int64_t longest = 1, sum = 0;
    if (const Lengths& list = w.varlen.values[side]) {
      longest = 0;
      std::vector<int32_t>& cu = line.values[side ? TESSERA_CU_SEQLENS_K : TESSERA_CU_SEQLENS_Q];
      cu.push_back(0);
      for (const int32_t length : *list) {
        require(length >= 0, "varlen={} has the length {}; lengths are at least 0.", letter, length);
        longest = std::max<int64_t>(longest, length);
        sum += length;
        require(sum <= INT32_MAX, "varlen={} has more than 2^31 - 1 rows; offsets are int32. Split the batch.", letter);
        cu.push_back(static_cast<int32_t>(sum));
      }
    } else if (w.varlen.said[side]) {
      require(w.len[side] && w.rows[side], "varlen={0} has no list; say {0} (the longest length) and rows={0} besides.",
              letter);
    }
    require(!w.rows[side] || w.varlen.said[side], "rows={0} is said but {0} is not packed; say varlen={0}.", letter);
    (side ? p.len_k : p.len_q) = w.len[side].value_or(longest);
    if (w.varlen.said[side]) (side ? p.rows_k : p.rows_q) = w.rows[side].value_or(sum);
    if (w.seqused.values[side]) line.values[side ? TESSERA_SEQUSED_K : TESSERA_SEQUSED_Q] = *w.seqused.values[side];
  }
  if (w.corner_offsets) line.values[TESSERA_CORNER_OFFSETS] = *w.corner_offsets;
}

std::array<int64_t, 4> extents(const Problem& p, const Dims& dims) {
  const int64_t full[] = {p.batch, p.heads_q, p.len_q, p.len_k};
  std::array<int64_t, 4> e = {};
  for (size_t d = 0; d < 4; ++d) e[d] = dims[d] == '1' ? 1 : full[d];
  return e;
}

// Everything but strides that are said.
void build_operands(const Words& w, Problem& p) {
  const bool backward = p.pass == TESSERA_BACKWARD;
  const auto declare_if = [&](bool said, int name, int32_t dtype) {
    if (said) declare(p, name, dtype, w.layout);
  };
  declare_if(w.varlen.said[0], TESSERA_CU_SEQLENS_Q, TESSERA_I32);
  declare_if(w.varlen.said[1], TESSERA_CU_SEQLENS_K, TESSERA_I32);
  declare_if(w.seqused.said[0], TESSERA_SEQUSED_Q, TESSERA_I32);
  declare_if(w.seqused.said[1], TESSERA_SEQUSED_K, TESSERA_I32);
  declare_if(w.per_sequence_corner, TESSERA_CORNER_OFFSETS, TESSERA_I32);
  for (const int name : {TESSERA_Q, TESSERA_K, TESSERA_V}) declare(p, name, w.dtype, w.layout);
  const int32_t accumulation = accumulation_dtype(p);
  declare(p, TESSERA_OUT, w.out_dtype.value_or(w.dtype), w.layout);
  declare_if(w.lse, TESSERA_LSE, accumulation);
  declare_if(w.max_score, TESSERA_MAX_SCORE, accumulation);
  declare_if(w.exclude_keys, TESSERA_EXCLUDE_KEYS, TESSERA_BOOL);
  declare_if(w.documents, TESSERA_DOCUMENTS_Q, TESSERA_I32);
  declare_if(w.documents, TESSERA_DOCUMENTS_K, TESSERA_I32);
  declare_if(w.sink, TESSERA_SINKS, accumulation);
  if (w.alibi) declare_extents(p, TESSERA_SLOPES, accumulation, {w.alibi->empty() ? 1 : p.batch, 1, p.heads_q, 1});
  if (w.bias) declare_extents(p, TESSERA_BIAS, w.bias_dtype.value_or(w.dtype), extents(p, *w.bias));
  if (w.keep) declare_extents(p, TESSERA_KEEP, TESSERA_BOOL, extents(p, *w.keep));
  if (!backward) {
    require(!w.dlse && !w.grads, "dlse and grads belong to backward lines.");
    return;
  }
  declare(p, TESSERA_DOUT, operand(p, TESSERA_OUT).dtype, w.layout);
  declare_if(w.dlse, TESSERA_DLSE, accumulation);
  for (int name = 0; name < TESSERA_NAMES; ++name) {
    const OperandRow& row = operand_row(name);
    if (!is_output(row.backward)) continue;
    const bool wanted = w.grads ? std::count(w.grads->begin(), w.grads->end(), name) > 0 : has(p, row.partner);
    if (!wanted) continue;
    require(has(p, row.partner), "grads has {} but the line has no {}.", row.text, operand_row(row.partner).text);
    declare(p, name, operand(p, row.partner).dtype, w.layout);
    if (row.broadcasts) p.operand[name] = operand(p, row.partner);
  }
}

// Lengths that the line gives are known: whatever a run would refuse is refused here.
void check_lists(const Line& line) {
  Bindings bound = {};
  for (const int name : {TESSERA_CU_SEQLENS_Q, TESSERA_CU_SEQLENS_K, TESSERA_SEQUSED_Q, TESSERA_SEQUSED_K}) {
    if (!has(line.problem, name)) continue;
    const auto found = line.values.find(name);
    if (found == line.values.end()) return;  // they come at run time
    bound.data[name] = const_cast<int32_t*>(found->second.data());
  }
  check_lengths(line.problem, bound);
}

Line build(Words w) {
  Line line;
  line.problem = w.problem;
  line.seed = w.seed;
  line.offset = w.offset;
  Problem& p = line.problem;
  // Sizes first: full extents are made of them, so they must be sound before anything is multiplied.
  build_sizes(w, line);
  const std::pair<const char*, int64_t> sizes[] = {{"b", p.batch}, {"h", p.heads_q},     {"h", p.heads_kv},
                                                   {"q", p.len_q}, {"k", p.len_k},       {"d", p.dim},
                                                   {"d", p.dim_v}, {"rows=q", p.rows_q}, {"rows=k", p.rows_k}};
  for (const auto& [word, n] : sizes)
    require(n >= 0 && n <= INT32_MAX, "{} is {}; it must be from 0 to 2^31 - 1.", word, n);
  const double largest = static_cast<double>(std::max<int64_t>(p.batch, 1)) *
                         static_cast<double>(std::max({p.len_q, p.len_k, p.rows_q, p.rows_k, int64_t{1}})) *
                         static_cast<double>(p.heads_q + p.heads_kv) * static_cast<double>(p.dim + p.dim_v);
  require(largest < 0x1p58, "the tensors have {:.3g} elements; they must stay below 2^58. Use smaller sizes.", largest);
  build_operands(w, p);
  if (p.mask.corner == TESSERA_CORNER_UNSET && needs_corner(p)) p.mask.corner = TESSERA_BOTTOM_RIGHT;
  for (const Strides& s : w.strides) {
    require(has(p, s.name), "strides has {} but the line does not.", operand_row(s.name).text);
    std::copy(s.values.begin(), s.values.end(), p.operand[s.name].stride);
  }
  check(p);
  check_lists(line);
  return line;
}

// ------------------------------------------------------------------------------------------------------ printing

std::string list_text(const std::vector<int32_t>& values) {
  return fmt::format("[{}]", fmt::join(values, ","));
}

std::string dims_text(const Operand& o) {
  std::string text;
  for (int d = 0; d < 4; ++d) text += fmt::format("{}{}", d ? "," : "", o.extent[d] == 1 ? '1' : grid_letters[d]);
  return text;
}

const std::vector<int32_t>* values_of(const Line& line, int name) {
  const auto found = line.values.find(name);
  return found == line.values.end() ? nullptr : &found->second;
}

std::string mask_text(const Line& line) {
  const Problem& p = line.problem;
  const tessera_mask& m = p.mask;
  std::string corner;
  if (m.corner != TESSERA_CORNER_UNSET) corner = std::string("@") + corners[m.corner - TESSERA_BOTTOM_RIGHT];
  if (m.corner == TESSERA_CORNER_AT) {
    const std::vector<int32_t>* offsets = values_of(line, TESSERA_CORNER_OFFSETS);
    if (offsets) corner += list_text(*offsets);
    else if (!has(p, TESSERA_CORNER_OFFSETS)) corner += fmt::format("({})", m.corner_at);
  }
  const auto bound = [](int32_t unbounded, int64_t n) {
    return unbounded ? std::string("unbounded") : std::to_string(n);
  };
  std::vector<std::string> parts;
  const auto positioned = [&](const std::string& part) {
    parts.push_back(part + corner);
    corner.clear();  // said once
  };
  if (m.causal) positioned("causal");
  if (m.has_window)
    positioned(fmt::format("window({},{})", bound(m.window_left_unbounded, m.window_left),
                           bound(m.window_right_unbounded, m.window_right)));
  if (m.chunk) positioned(fmt::format("chunk({})", m.chunk));
  if (m.has_prefix) positioned(fmt::format("prefix({})", m.prefix));
  if (!corner.empty()) positioned("corner");
  if (m.first) parts.push_back(fmt::format("first({})", m.first));
  if (has(p, TESSERA_KEEP)) {
    const std::string dims = dims_text(operand(p, TESSERA_KEEP));
    parts.push_back(dims == "1,1,q,k" ? "keep" : fmt::format("keep({})", dims));
  }
  if (has(p, TESSERA_EXCLUDE_KEYS)) parts.push_back("exclude_keys");
  if (has(p, TESSERA_DOCUMENTS_Q)) parts.push_back("documents");
  return parts.empty() ? "" : fmt::format(" mask={}", fmt::join(parts, "&"));
}

std::string packed_text(const Line& line) {
  const Problem& p = line.problem;
  std::string varlen, seqused, rows;
  for (int side = 0; side < 2; ++side) {
    const char letter = side ? 'k' : 'q';
    const int cu_name = side ? TESSERA_CU_SEQLENS_K : TESSERA_CU_SEQLENS_Q;
    const int used_name = side ? TESSERA_SEQUSED_K : TESSERA_SEQUSED_Q;
    if (has(p, cu_name)) {
      varlen += letter;
      const std::vector<int32_t>* cu = values_of(line, cu_name);
      if (cu) {
        std::vector<int32_t> lengths;
        for (size_t b = 1; b < cu->size(); ++b) lengths.push_back((*cu)[b] - (*cu)[b - 1]);
        varlen += list_text(lengths);
      }
      const int64_t total = side ? p.rows_k : p.rows_q;
      if (!cu || cu->back() != total) rows += fmt::format("{}{}", letter, total);
    }
    if (has(p, used_name)) {
      seqused += letter;
      if (const std::vector<int32_t>* used = values_of(line, used_name)) seqused += list_text(*used);
    }
  }
  return (varlen.empty() ? "" : " varlen=" + varlen) + (rows.empty() ? "" : " rows=" + rows) +
         (seqused.empty() ? "" : " seqused=" + seqused);
}

std::string outputs_text(const Problem& p) {
  std::string text;
  if (!has(p, TESSERA_LSE)) text += " nolse";
  if (has(p, TESSERA_MAX_SCORE)) text += " max";
  if (has(p, TESSERA_DLSE)) text += " dlse";
  if (operand(p, TESSERA_OUT).dtype != data_dtype(p))
    text += fmt::format(" out={}", rules::dtype_rows[operand(p, TESSERA_OUT).dtype].text);
  if (p.pass == TESSERA_FORWARD) return text;
  bool all = true;
  std::vector<std::string> names;
  for (int name = 0; name < TESSERA_NAMES; ++name) {
    const OperandRow& row = operand_row(name);
    if (!is_output(row.backward)) continue;
    if (has(p, name)) names.push_back(row.text);
    all = all && has(p, name) == has(p, row.partner);
  }
  return all ? text : text + fmt::format(" grads={}", fmt::join(names, ","));
}

// Operands whose strides are not those of `layout`, as "q[...]k[...]".
std::string strides_text(const Problem& p, int layout) {
  std::string text;
  for (int name = 0; name < TESSERA_NAMES; ++name) {
    if (!has(p, name)) continue;
    Problem dense = p;
    const Operand& o = operand(p, name);
    if (operand_row(name).broadcasts)
      declare_extents(dense, name, o.dtype, {o.extent[0], o.extent[1], o.extent[2], o.extent[3]});
    else declare(dense, name, o.dtype, layout);
    if (!std::equal(o.stride, o.stride + 4, operand(dense, name).stride))
      text += fmt::format("{}[{}]", operand_row(name).text, fmt::join(o.stride, o.stride + 4, ","));
  }
  return text;
}

std::string layout_text(const Problem& p) {
  std::string shortest = strides_text(p, TESSERA_BSHD);
  int layout = TESSERA_BSHD;
  for (int other = TESSERA_BHSD; other <= TESSERA_KV; ++other) {
    const std::string text = strides_text(p, other);
    if (text.size() < shortest.size()) shortest = text, layout = other;
  }
  return (layout == TESSERA_BSHD ? "" : fmt::format(" layout={}", layouts[layout])) +
         (shortest.empty() ? "" : " strides=" + shortest);
}

}  // namespace

Line parse(const std::string& text) {
  return build(read_words(text));
}

std::string print(const Line& line) {
  const Problem& p = line.problem;
  const auto pair = [](int64_t a, int64_t b) { return a == b ? std::to_string(a) : fmt::format("{}/{}", a, b); };
  std::string text = fmt::format("{} {} b{} h{} q{} k{} d{}", p.pass == TESSERA_FORWARD ? "forward" : "backward",
                                 rules::dtype_rows[data_dtype(p)].text, p.batch, pair(p.heads_q, p.heads_kv), p.len_q,
                                 p.len_k, pair(p.dim, p.dim_v));
  text += layout_text(p) + mask_text(line);
  if (p.has_scale) text += fmt::format(" scale={}", p.scale);
  if (p.softcap > 0) text += fmt::format(" softcap={}", p.softcap);
  if (has(p, TESSERA_SLOPES)) text += operand(p, TESSERA_SLOPES).extent[0] == 1 ? " alibi" : " alibi=b,h";
  if (has(p, TESSERA_SINKS)) text += " sink";
  if (has(p, TESSERA_BIAS)) {
    const Operand& bias = operand(p, TESSERA_BIAS);
    text += " bias=" + dims_text(bias);
    if (bias.dtype != data_dtype(p)) text += fmt::format(":{}", rules::dtype_rows[bias.dtype].text);
  }
  if (p.dropout > 0 || line.seed || line.offset) text += fmt::format(" dropout={}", p.dropout);
  if (line.seed) text += fmt::format("@seed{}", line.seed);
  if (line.offset) text += fmt::format("@offset{}", line.offset);
  text += packed_text(line) + outputs_text(p);
  if (p.deterministic) text += " deterministic";
  if (p.batch_invariant) text += " batch_invariant";
  if (p.allow_tf32) text += " allow_tf32";
  if (p.alignment) text += fmt::format(" align={}", p.alignment);
  return text;
}

std::string print(const Problem& problem) {
  Line line;
  line.problem = problem;
  return print(line);
}

}  // namespace tessera::core
