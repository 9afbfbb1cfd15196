// Bytes as choices: a small problem over every option, run on its own metadata or on hostile one. It is refused and
// nothing changes, or its answer is right and nothing else changes.
#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <map>
#include <optional>

#include "fuzz.h"
#include "tools/tessera/cache.h"
#include "tools/tessera/runner.h"
#include "tools/tessera/status.h"

namespace tessera::fuzz {
namespace {

bool show = false;  // say what an input means

// Choices taken from bytes. Past their end every choice is the first one, and "one in" is no.
class Bytes {
 public:
  Bytes(const uint8_t* data, size_t size) : next_(data), end_(data + size) {}
  int64_t below(int64_t n) { return n > 1 ? static_cast<int64_t>(take(n > 256 ? 4 : 1)) % n : 0; }
  bool one_in(int64_t n) { return below(n) == n - 1; }
  int32_t any() { return static_cast<int32_t>(take(4)); }
  template <class T>
  T of(std::initializer_list<T> choices) {
    return choices.begin()[below(static_cast<int64_t>(choices.size()))];
  }

 private:
  uint32_t take(int bytes) {
    uint32_t value = 0;
    for (int n = 0; n < bytes && next_ != end_; ++n) value |= uint32_t{*next_++} << 8 * n;
    return value;
  }
  const uint8_t *next_, *end_;
};

// ------------------------------------------------------------------------------------------------------ the line

int64_t length(Bytes& b) {
  return b.below(71);
}
int64_t dim(Bytes& b) {
  return 1 + b.below(40);
}
// `n` numbers, each from `least` on.
std::string list(Bytes& b, int64_t n, int64_t least, int64_t count) {
  std::string text = "[";
  for (int64_t i = 0; i < n; ++i) text += fmt::format("{}{}", i ? "," : "", least + b.below(count));
  return text + "]";
}

std::string mask(Bytes& b, int64_t batch) {
  const auto side = [&] { return b.one_in(4) ? std::string("unbounded") : std::to_string(b.below(60) - 8); };
  std::vector<std::string> parts;
  if (b.one_in(2)) parts.push_back("causal");
  else if (b.one_in(4)) parts.push_back(fmt::format("prefix({})", b.below(40)));
  if (b.one_in(3)) parts.push_back(fmt::format("window({},{})", side(), side()));
  const bool window = !parts.empty() && parts.back()[0] == 'w';
  if (b.one_in(6)) parts.push_back(fmt::format("chunk({})", 1 + b.below(40)));
  if (!parts.empty())
    parts.front() += b.of<std::string>(
        {"", "@top_left", "@at", "@at" + list(b, batch, -20, 90), fmt::format("@at({})", b.below(90) - 20)});
  if (window && b.one_in(2)) parts.push_back(fmt::format("first({})", 1 + b.below(40)));
  if (b.one_in(5)) parts.push_back(b.of<std::string>({"keep", "keep(b,h,q,k)", "keep(1,h,1,k)", "keep(b,1,q,1)"}));
  if (b.one_in(5)) parts.push_back("exclude_keys");
  if (b.one_in(6)) parts.push_back("documents");
  return parts.empty() ? "" : fmt::format(" mask={}", fmt::join(parts, "&"));
}

std::string scores(Bytes& b, bool f64) {
  std::string text;
  if (b.one_in(5)) text += " scale=" + b.of<std::string>({"0.3", "-0.2", "0", "1"});
  if (b.one_in(5)) text += " softcap=" + b.of<std::string>({"15", "1", "50"});
  if (b.one_in(5)) text += b.of<std::string>({" alibi", " alibi=b,h"});
  if (b.one_in(5)) text += " sink";
  if (b.one_in(5))
    text += " bias=" + b.of<std::string>({"1,h,q,k", "b,h,q,k", "b,1,1,k", "1,1,q,1", "1,1,1,1"}) +
            b.of<std::string>({"", ":f32", ":f64"});
  if (b.one_in(6)) text += fmt::format(" dropout=0.{}@seed{}", 1 + b.below(8), b.below(256));
  if (b.one_in(6)) text += f64 ? " out=f64" : " out=f32";
  return text;
}

std::string plain_line(Bytes& b, const std::string& pass) {
  const auto dtype = b.of<std::string>({"f32", "bf16", "f16", "f64"});
  const int64_t batch = b.of<int64_t>({1, 2, 3, 0});
  std::string line =
      fmt::format("{} {} h{} d{}", pass, dtype, b.of<std::string>({"1", "2", "4/2", "6/2", "5/1"}), dim(b));
  if (b.one_in(3)) line += fmt::format("/{}", dim(b));
  const bool packed_q = batch && b.one_in(3), packed_k = batch && b.one_in(packed_q ? 2 : 6);
  if (packed_q || packed_k) line += " varlen=";
  if (packed_q) line += "q" + list(b, batch, 0, 71);
  if (packed_k) line += "k" + list(b, batch, 0, 71);
  if (b.one_in(3) && (packed_q || packed_k))
    line += std::string(" rows=") + (packed_q ? "q230" : "") + (packed_k ? "k230" : "");
  line += fmt::format(" b{}", batch);
  if (!packed_q) line += fmt::format(" q{}", length(b));
  if (!packed_k) line += fmt::format(" k{}", length(b));
  if (b.one_in(3)) line += " layout=" + b.of<std::string>({"bhsd", "qkv", "kv"});
  if (b.one_in(3)) line += " seqused=" + b.of<std::string>({"k", "q", "qk"});
  line += mask(b, batch) + scores(b, dtype == "f64");
  if (pass == "backward" && b.one_in(2)) line += " dlse";
  if (pass == "forward" && b.one_in(3)) line += b.of<std::string>({" max", " nolse"});
  return b.one_in(4) ? line + " status" : line;
}

std::string cache_line(Bytes& b, const std::string& pass) {
  const auto dtype = b.of<std::string>({"f32", "bf16", "f16", "f64"});
  const int64_t batch = 1 + b.below(3), d = dim(b), q = b.below(9), n = b.below(9), k = length(b);
  const bool decodes = pass == "decode", appends = !decodes || b.one_in(2);
  std::string line = fmt::format("{} {} b{} k{} d{}", pass, dtype, batch, k, d);
  const bool in_k = b.one_in(5);
  if (in_k || b.one_in(3)) line += fmt::format("/{}", in_k ? 1 + b.below(d) : dim(b));
  if (in_k) line += " v_in_k";
  line += " h" + (decodes ? b.of<std::string>({"1", "2", "4/2", "6/1"}) : b.of<std::string>({"1", "2", "3"}));
  if (decodes) line += fmt::format(" q{}", q);
  if (decodes && appends) line += " append";
  if (appends) line += fmt::format(" n{}", n);
  const bool ring = b.one_in(5);
  const int64_t back = b.below(20), rows = batch + b.below(2), page = 1 + b.below(17);
  const int64_t slots = ring ? std::max(back + (decodes ? q : 0), n) + 1 + b.below(4) : k + 1 + b.below(20);
  const bool more_slots = ring || b.one_in(3);
  if (ring) line += " ring";
  if (more_slots) line += fmt::format(" slots={}", slots);
  // Lists that the line gives may be wrong, too.
  const auto given = [&](int64_t count, int64_t least, int64_t values) {
    return b.one_in(4) ? "=" + list(b, count, least, values) : "";
  };
  const bool other_rows = b.one_in(3);
  if (other_rows) line += fmt::format(" cache_rows={} cache_batch_idx", rows) + given(batch, -1, rows + 2);
  if (b.one_in(2)) {
    const int64_t columns = ((more_slots ? slots : k) + page - 1) / page, table_rows = other_rows ? rows : batch;
    line += fmt::format(" page={}", page);
    if (b.one_in(4)) line += fmt::format(" pages={}", b.below(20));
    if (b.one_in(4)) line += " page_table=" + list(b, table_rows * columns, -1, table_rows * columns + 2);
  }
  if (b.one_in(3)) line += " left_pad" + given(batch, -1, 9);
  if (b.one_in(2)) line += " cache_lens=" + list(b, b.one_in(4) ? 1 : batch, 0, std::max<int64_t>(1, k - n + 1));
  if (appends && b.one_in(3)) line += " varlen=n" + list(b, batch, 0, n + 1);
  else if (appends && b.one_in(3)) line += " seqused=n";
  else if (decodes && b.one_in(4)) line += " varlen=q" + list(b, batch, 0, q + 1);
  if (d > 1 && !in_k && b.one_in(3)) {
    line += fmt::format(" rotary={}", 2 + 2 * b.below(d / 2)) + b.of<std::string>({"", ":interleaved"});
    if (b.one_in(3)) line += ":" + dtype;
    if (b.one_in(3)) line += fmt::format(" positions={}", 1 + b.below(80));
  }
  if (b.one_in(3))
    line += " kv=e4m3" + b.of<std::string>({"", ":tensor", ":head", ":token", ":token_head", ":head/token"});
  if (b.one_in(2)) line += " status";
  if (!decodes) return line;
  if (ring) line += fmt::format(" mask=causal&window({},0)", back);
  else line += mask(b, batch);
  line += scores(b, dtype == "f64");
  if (b.one_in(3)) line += b.of<std::string>({" max", " nolse"});
  return line;
}

std::string draw_line(Bytes& b) {
  const auto pass = b.of<std::string>({"forward", "decode", "backward", "decode", "append"});
  return pass == "forward" || pass == "backward" ? plain_line(b, pass) : cache_line(b, pass);
}

// ---------------------------------------------------------------------------------------------- hostile metadata

std::string spoil(Bytes& b, const tools::Case& c) {
  std::string what;
  for (const int name : {TESSERA_CU_SEQLENS_Q, TESSERA_CU_SEQLENS_K, TESSERA_CU_SEQLENS_NEW, TESSERA_SEQUSED_Q,
                         TESSERA_SEQUSED_K, TESSERA_SEQUSED_NEW, TESSERA_CORNER_OFFSETS, TESSERA_CACHE_LENS,
                         TESSERA_CACHE_BATCH_IDX, TESSERA_LEFT_PAD, TESSERA_PAGE_TABLE}) {
    const tessera_operand& o = c.operand(name);
    if (!c.has(name) || o.extent[0] * o.extent[1] == 0) continue;
    for (int64_t times = b.below(3); times > 0; --times) {
      const tools::Index at = {b.below(o.extent[0]), b.below(o.extent[1]), 0, 0};
      auto& value = *reinterpret_cast<int32_t*>(c.at(name, at));
      constexpr int32_t most = std::numeric_limits<int32_t>::max(), least = std::numeric_limits<int32_t>::min();
      switch (b.below(4)) {
        case 0:
          value = static_cast<int32_t>(b.below(90)) - 10;
          break;
        case 1:
          value = b.of<int32_t>({-1, most, least, most - 1, least + 1});
          break;
        case 2:
          value = static_cast<int32_t>(b.below(5));
          break;
        case 3:
          value = b.any();
          break;
      }
      what += fmt::format(" {}[{},{}]={}", tessera_name_text(name), at[0], at[1], value);
    }
  }
  return what;
}

// -------------------------------------------------------------------------------------------------------- the run

using Memory = std::map<int, std::vector<std::byte>>;
Memory memory_of(const tools::Case& c) {
  Memory all;
  for (int name = 0; name < TESSERA_NAMES; ++name) {
    if (!c.has(name)) continue;
    const std::byte* const begin = c.at(name, {0, 0, 0, 0});
    all[name] = {begin, begin + c.span(name)};
  }
  return all;
}

bool holds(const std::vector<int>& names, int name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// What lies between the elements of an output is nobody's; it was 0xFF.
bool gaps_untouched(const tools::Case& c, int name, std::vector<std::byte> bytes) {
  const tessera_operand& o = c.operand(name);
  const size_t size = tessera_dtype_bytes(o.dtype);
  tools::for_each_index(tools::extents(o), [&](const tools::Index& i) {
    std::fill_n(bytes.begin() + tools::offset_of(o, i) * static_cast<int64_t>(size), size, std::byte{0xFF});
  });
  return std::all_of(bytes.begin(), bytes.end(), [](std::byte x) { return x == std::byte{0xFF}; });
}

// True, or false if it is refused for its metadata.
template <class Work>
bool answers(Work work, const std::string& what) {
  std::string refused;
  try {
    work();
  } catch (const tools::Error& error) {
    need(error.code == TESSERA_INVALID && *error.what(), "{}\n  code {}: {}", what, error.code, error.what());
    refused = error.what();
  }
  if (show) std::fprintf(stderr, "  %s\n", refused.empty() ? "answered" : refused.c_str());
  return refused.empty();
}

// The same of a run, which leaves everything but what it answers as it was.
bool run(const tools::Case& c, const tessera_problem& problem, const tools::Choice& how, const std::string& what) {
  const Memory before = memory_of(c);
  const tools::Guard guard(c);
  tools::Runner runner(c, problem, how);
  const bool ran = answers([&] { runner.run(); }, what);
  if (ran) guard.check();
  const std::vector<int> outputs = tools::outputs(problem), updates = tools::updates(problem);
  for (const auto& [name, bytes] : memory_of(c)) {
    const char* const text = tessera_name_text(name);
    if (name == TESSERA_STATUS)
      need((c.value(name, 0) == 0) == ran, "{}\n  status is {}; ran: {}", what, c.value(name, 0), ran);
    else if (ran && holds(outputs, name))
      need(gaps_untouched(c, name, bytes), "{}\n  {} is written between its elements", what, text);
    else if (!ran || !holds(updates, name))
      need(bytes == before.at(name), "{}\n  {} has changed; ran: {}", what, text, ran);
  }
  return ran;
}

// As in the property test: float32 rounds as its yardstick does, so that of few numbers one may miss the bound by luck.
bool right(const tessera_verdict& v, bool f32) {
  return v.ok || (f32 && v.nonfinite_equal && v.max <= 8 * v.bound);
}

std::string kernel(Bytes& b) {
  static const int best = tools::find_device("host").isa;
  static const char* const all[] = {"cpu.baseline", "cpu.avx2", "cpu.avx512", "cpu.avx512bf16"};
  return all[best - b.below(best + 1)];
}

// The picture of the mask reads the same metadata.
void draw_mask(const tools::Case& c, bool sound, const std::string& what) {
  const tessera_problem& p = c.problem();
  std::vector<uint8_t> grid(static_cast<size_t>(p.len_q * p.len_k));
  for (int64_t batch = 0; batch < p.batch; ++batch) {
    tessera_error error = tools::fresh_error();
    const int32_t code = tessera_mask_grid(&p, &c.bindings(), batch, p.heads_q - 1, grid.data(), &error);
    need(code == TESSERA_OK || (code == TESSERA_INVALID && !sound), "{}\n  mask {}: {}", what, code, error.message);
  }
}

void examine(tools::Case& c, const tools::Choice& how, bool hostile, const std::string& what) {
  const tessera_problem& p = c.problem();
  bool ran = p.pass != TESSERA_BACKWARD || run(c, tools::forward_of(p), how, what);
  if (ran) {
    for (const int name : tools::outputs(p)) c.wipe(name);
    ran = run(c, p, how, what);
  } else {
    need(!run(c, p, how, what), "{}\n  backward takes what forward refuses", what);
  }
  if (p.pass != TESSERA_APPEND) draw_mask(c, ran, what);
  need(ran || hostile || tools::is_cache(p), "{}\n  refused without a reason", what);
  if (!ran) {
    need(!answers([&] { tools::judge(c, 0); }, what), "{}\n  the judge takes what the kernel refuses", what);
    return;
  }
  for (const tessera_verdict& v : tools::judge(c, 0).verdicts)
    need(right(v, p.operand[TESSERA_Q].dtype == TESSERA_F32),
         "{}\n  {}: max {} (bound {}), rms {} (bound {}), non-finite equal {}", what, tessera_name_text(v.name), v.max,
         v.bound, v.rms, v.bound_rms, v.nonfinite_equal);
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  for (int n = 1; n < *argc; ++n) show = show || std::strcmp((*argv)[n], "--show") == 0;
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Bytes b(data, size);
  tools::Choice how = {.kernels = kernel(b), .threads = 1 + static_cast<int>(b.below(2))};
  if (b.one_in(2)) how.tile_rows = b.of({1, 3, 16, 64});
  if (b.one_in(2)) how.tile_keys = b.of({1, 5, 16, 64});
  const bool hostile = b.one_in(2);
  const std::string line = draw_line(b);
  std::string what =
      fmt::format("{}\n  {} threads {} tiles {}x{}", line, how.kernels, how.threads, how.tile_rows, how.tile_keys);
  if (show) std::fprintf(stderr, "%s\n", what.c_str());
  std::optional<tools::Case> c;
  try {
    c.emplace(tools::Line(line));
    tools::fill_random(*c, static_cast<uint64_t>(b.below(256)));
    if (hostile) what += spoil(b, *c);
    else tools::poison(*c);  // what sound metadata excludes
  } catch (const tools::Error& error) {
    need(error.code == TESSERA_INVALID, "{}\n  code {}: {}", what, error.code, error.what());
    if (show) std::fprintf(stderr, "  not a question: %s\n", error.what());
    return 0;
  }
  if (show) std::fprintf(stderr, "%s\n", what.c_str());
  try {
    examine(*c, how, hostile, what);
  } catch (const tools::Error& error) {
    need(error.code == TESSERA_UNSUPPORTED && how.kernels == "cpu.avx512bf16", "{}\n  code {}: {}", what, error.code,
         error.what());
  }
  return 0;
}

}  // namespace tessera::fuzz
