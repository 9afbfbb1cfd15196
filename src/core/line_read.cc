// Text to words.
#include <algorithm>
#include <charconv>
#include <climits>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <string_view>

#include "core/error.h"
#include "core/line_words.h"
#include "rules/dtype.h"

namespace tessera::core {
namespace {

using std::string_view;

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
  int64_t size_from(int64_t least) {
    const int64_t n = integer();
    if (n < least || n > INT32_MAX) fail("{} is out of range; it must be from {} to 2^31 - 1.", n, least);
    return n;
  }
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

constexpr const char* scale_words[] = {"none", "tensor", "head", "token", "token_head"};

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

void read_sides(Reader& r, Sides& said) {
  for (size_t side = 0; side < std::size(sides); ++side) {
    if (!r.take(string_view(&sides[side].letter, 1))) continue;
    said.said[side] = true;
    if (r.rest.starts_with("[")) said.values[side] = r.lengths();
  }
  if (std::none_of(std::begin(said.said), std::end(said.said), [](bool x) { return x; }))
    r.fail("say q, k, n or several, as in q[3,5]k[7,5].");
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

void read_strides(Reader& r, Words& w) {
  while (!r.done()) {
    const int name = r.operand_name();
    for (const Strides& said : w.strides)
      if (said.name == name) r.fail("{} is said twice; say it once.", operand_row(name).text);
    w.strides.push_back({name, r.list()});
    if (w.strides.back().values.size() != 4)
      r.fail("{} has {} strides; give 4, in elements.", operand_row(name).text, w.strides.back().values.size());
  }
}

void read_mask(Reader& r, Words& w) {
  std::set<string_view> said;
  do read_mask_part(r, w, said);
  while (r.take("&"));
}

void read_rows(Reader& r, Words& w) {
  bool any = false;
  for (size_t side = 0; side < std::size(sides); ++side)
    if (r.take(string_view(&sides[side].letter, 1))) w.rows[side] = r.integer(), any = true;
  if (!any) r.fail("say q, k, n or several, as in q100k120.");
}

void read_grads(Reader& r, Words& w) {
  w.grads.emplace();
  do {
    const int name = r.operand_name();
    if (!is_output(operand_row(name).roles[TESSERA_BACKWARD])) r.fail("{} is not a gradient.", operand_row(name).text);
    w.grads->push_back(name);
  } while (r.take(","));
}

void read_dropout(Reader& r, Words& w) {
  w.problem.dropout = 0.0 + r.number<double>("a number");  // no -0
  if (r.take("@seed")) w.seed = r.number<uint64_t>("a seed");
  if (r.take("@offset")) w.offset = r.number<uint64_t>("an offset");
}

void read_rotary(Reader& r, Words& w) {
  w.problem.cache.rotary_dim = r.size_from(2);
  bool half = false;
  while (r.take(":")) {
    if (r.take("interleaved")) w.problem.cache.rotary_interleaved = 1;
    else if (r.take("half")) half = true;
    else w.angle_dtype = r.float_dtype();
  }
  if (half && w.problem.cache.rotary_interleaved) r.fail("half and interleaved are both said; say one.");
}

void read_kv(Reader& r, Words& w) {
  if (!r.take("e4m3")) r.fail("expected e4m3 before \"{}\"; otherwise k and v are q's dtype.", r.rest);
  w.kv_dtype = TESSERA_E4M3;
  if (!r.take(":")) return;
  w.scales[0] = w.scales[1] = scale_words[r.one_of(scale_words, "what shares a scale of k")];
  if (r.take("/")) w.scales[1] = scale_words[r.one_of(scale_words, "what shares a scale of v")];
}

void read_list(Reader& r, Lists& list) {
  list.said = true;
  list.values = r.lengths();
}

// Every key that takes a value; reading and hints both walk this table.
struct Option {
  string_view key;
  void (*read)(Reader&, Words&);
};
constexpr Option options[] = {
    {"layout", [](Reader& r, Words& w) { w.layout = r.one_of(layouts, "layout"); }},
    {"strides", read_strides},
    {"mask", read_mask},
    {"scale",
     [](Reader& r, Words& w) {
       w.problem.has_scale = 1;
       w.problem.scale = r.number<double>("a number");
     }},
    {"softcap", [](Reader& r, Words& w) { w.problem.softcap = 0.0 + r.number<double>("a number"); }},
    {"alibi", [](Reader& r, Words& w) { w.alibi = std::string(r.take("b,h") ? "b,h" : ""); }},
    {"bias",
     [](Reader& r, Words& w) {
       w.bias = read_dims(r);
       if (r.take(":")) w.bias_dtype = r.float_dtype();
     }},
    {"dropout", read_dropout},
    {"varlen", [](Reader& r, Words& w) { read_sides(r, w.varlen); }},
    {"seqused", [](Reader& r, Words& w) { read_sides(r, w.seqused); }},
    {"rows", read_rows},
    {"out", [](Reader& r, Words& w) { w.out_dtype = r.float_dtype(); }},
    {"grads", read_grads},
    {"align", [](Reader& r, Words& w) { w.problem.alignment = r.integer(); }},
    {"page", [](Reader& r, Words& w) { w.problem.cache.page_size = r.size_from(1); }},
    {"pages", [](Reader& r, Words& w) { w.problem.cache.pages = r.size_from(0); }},
    {"slots", [](Reader& r, Words& w) { w.problem.cache.slots = r.size_from(1); }},
    {"cache_rows", [](Reader& r, Words& w) { w.problem.cache.rows = r.size_from(1); }},
    {"cache_lens", [](Reader& r, Words& w) { read_list(r, w.cache_lens); }},
    {"cache_batch_idx", [](Reader& r, Words& w) { read_list(r, w.cache_batch_idx); }},
    {"left_pad", [](Reader& r, Words& w) { read_list(r, w.left_pad); }},
    {"page_table", [](Reader& r, Words& w) { read_list(r, w.page_table); }},
    {"rotary", read_rotary},
    {"positions", [](Reader& r, Words& w) { w.problem.cache.rotary_positions = r.size_from(1); }},
    {"kv", read_kv},
};

void read_option(Reader& r, string_view key, Words& w) {
  const Option* const found =
      std::find_if(std::begin(options), std::end(options), [&](const Option& o) { return o.key == key; });
  if (found == std::end(options)) r.fail("\"{}=\" is unknown; see the grammar in ADDING.md.", key);
  found->read(r, w);
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
  else if (word == "append") w.appends = true;
  else if (word == "status") w.status = true;
  else if (word == "ring") w.problem.cache.ring = 1;
  else if (word == "v_in_k") w.problem.cache.v_in_k = 1;
  else if (word == "cache_lens") w.cache_lens.said = true;
  else if (word == "cache_batch_idx") w.cache_batch_idx.said = true;
  else if (word == "left_pad") w.left_pad.said = true;
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
  else if (r.take("n")) w.len[2] = r.integer();
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
      string_view("bqknhd").find(word[0]) != string_view::npos)
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
  for (const Option& option : options)
    if (stem == option.key)
      return fmt::format("{} takes a value, as in {}=...; see the grammar in ADDING.md.", option.key, option.key);
  if (word.size() == 1 && string_view("bqknhd").find(word[0]) != string_view::npos)
    return fmt::format("{0} takes a whole number, as in {0}64.", word);
  return "a word is a dtype (f64, f32, bf16, f16), a size (b4 h32/8 q512 k512 d64), an option or key=value; see the "
         "grammar in ADDING.md.";
}

}  // namespace

Words read_words(const std::string& text) {
  Words w;
  w.problem.size = sizeof(Problem);
  w.problem.heads_q = w.problem.heads_kv = 1;
  std::istringstream in(text.substr(0, text.find('#')));
  std::string word;
  if (!(in >> word)) invalid("the line is empty; it begins with forward, backward, decode or append.");
  if (word == "backward") {
    w.problem.pass = TESSERA_BACKWARD;
  } else if (word == "decode") {  // forward on a cache
    w.cache_lens.said = true;
  } else if (word == "append") {
    w.problem.pass = TESSERA_APPEND;
    w.appends = w.cache_lens.said = true;
  } else if (word != "forward") {
    invalid("\"{}\": a line begins with forward, backward, decode or append.", word);
  }
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

}  // namespace tessera::core
