#include "core/line.h"

#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>

#include "refusal.h"

namespace tessera::core {
namespace {

bool same(const Line& a, const Line& b) {
  return std::memcmp(&a.problem, &b.problem, sizeof a.problem) == 0 && a.values == b.values && a.seed == b.seed;
}

// ------------------------------------------------------------------------------------------------------- goldens

struct Golden {
  const char *text, *printed;
};
constexpr Golden goldens[] = {
    {"forward d64", "forward f32 b1 h1 q1 k1 d64"},
    {"forward d64 # a remark", "forward f32 b1 h1 q1 k1 d64"},
    {"forward bf16 b4 h32/8 q4096 k4096 d128 mask=causal",
     "forward bf16 b4 h32/8 q4096 k4096 d128 mask=causal@bottom_right"},
    {"forward d128/64 k9 bf16 q7 h4 b2", "forward bf16 b2 h4 q7 k9 d128/64"},
    {"backward f32 b2 h6/2 q127 k300 d80/48 mask=window(64,0) layout=bhsd deterministic",
     "backward f32 b2 h6/2 q127 k300 d80/48 layout=bhsd mask=window(64,0)@bottom_right deterministic"},
    {"forward f16 h4/2 d64 varlen=q[3,0,129]k[5,2,129] mask=causal dropout=0.1@seed7 softcap=30 alibi sink "
     "bias=1,h,q,k",
     "forward f16 b3 h4/2 q129 k129 d64 mask=causal@bottom_right softcap=30 alibi sink bias=1,h,q,k dropout=0.1@seed7 "
     "varlen=q[3,0,129]k[5,2,129]"},
    {"forward bf16 b2 h4 q7 k9 d64 mask=causal@at(3)&window(4,unbounded)&documents",
     "forward bf16 b2 h4 q7 k9 d64 mask=causal@at(3)&window(4,unbounded)&documents"},
    {"forward d8 mask=first(4)&window(-2,5)@top_left",
     "forward f32 b1 h1 q1 k1 d8 mask=window(-2,5)@top_left&first(4)"},
    {"forward d8 mask=none", "forward f32 b1 h1 q1 k1 d8"},
    {"forward d8 mask=corner", "forward f32 b1 h1 q1 k1 d8"},
    {"forward d8 mask=corner@top_left", "forward f32 b1 h1 q1 k1 d8 mask=corner@top_left"},
    {"forward d8 mask=causal@at[1,-2]", "forward f32 b2 h1 q1 k1 d8 mask=causal@at[1,-2]"},
    {"forward b2 d8 mask=causal@at", "forward f32 b2 h1 q1 k1 d8 mask=causal@at"},
    {"forward b2 h2 q3 k4 d8 mask=keep&exclude_keys", "forward f32 b2 h2 q3 k4 d8 mask=keep&exclude_keys"},
    {"forward b2 h2 q3 k4 d8 mask=keep(b,1,q,1)", "forward f32 b2 h2 q3 k4 d8 mask=keep(b,1,q,1)"},
    {"forward bf16 q3 k4 d8 bias=1,1,q,k:f32", "forward bf16 b1 h1 q3 k4 d8 bias=1,1,q,k:f32"},
    {"forward b2 d8 alibi=b,h", "forward f32 b2 h1 q1 k1 d8 mask=corner@bottom_right alibi=b,h"},
    {"forward d8 scale=0.1", "forward f32 b1 h1 q1 k1 d8 scale=0.1"},
    {"forward d8 scale=1e-300", "forward f32 b1 h1 q1 k1 d8 scale=1e-300"},
    {"forward d8 nolse max out=f32 align=64", "forward f32 b1 h1 q1 k1 d8 nolse max align=64"},
    {"forward f16 d8 out=f32", "forward f16 b1 h1 q1 k1 d8 out=f32"},
    {"backward q2 k2 d8 grads=dv,dq dlse", "backward f32 b1 h1 q2 k2 d8 dlse grads=dq,dv"},
    {"backward q2 k2 d8 sink grads=dq,dk,dv,dsinks", "backward f32 b1 h1 q2 k2 d8 sink"},
    {"forward b2 q5 k6 d8 seqused=q[5,0]k[6,1]", "forward f32 b2 h1 q5 k6 d8 seqused=q[5,0]k[6,1]"},
    {"forward b2 q5 k6 d8 seqused=k", "forward f32 b2 h1 q5 k6 d8 seqused=k"},
    {"forward b2 q5 k6 d8 varlen=qk rows=q8k9", "forward f32 b2 h1 q5 k6 d8 varlen=qk rows=q8k9"},
    {"forward d8 varlen=q[1,2] rows=q7 q4 k3", "forward f32 b2 h1 q4 k3 d8 varlen=q[1,2] rows=q7"},
    {"forward d8 varlen=q[]k[]", "forward f32 b0 h1 q0 k0 d8 varlen=q[]k[]"},
    {"forward b0 d8", "forward f32 b0 h1 q1 k1 d8"},
    {"forward h4/2 q3 k3 d8/4 layout=qkv", "forward f32 b1 h4/2 q3 k3 d8/4 layout=qkv"},
    {"forward h4/2 q3 k3 d8 layout=kv", "forward f32 b1 h4/2 q3 k3 d8 layout=kv"},
    {"forward q2 k2 d8 strides=k[0,64,16,2]", "forward f32 b1 h1 q2 k2 d8 strides=k[0,64,16,2]"},
    {"forward d8 dropout=0@seed9", "forward f32 b1 h1 q1 k1 d8 dropout=0@seed9"},
    {"forward d8 deterministic batch_invariant allow_tf32",
     "forward f32 b1 h1 q1 k1 d8 deterministic batch_invariant allow_tf32"},
    {"decode bf16 b16 h64/8 q4 k8192 d128 page=16 append rotary=64:interleaved",
     "decode bf16 b16 h64/8 q4 k8192 d128 append page=16 rotary=64:interleaved mask=corner@bottom_right"},
    {"decode b2 k9 d8 append n3 cache_lens=[4,6] left_pad=[1,0]",
     "decode f32 b2 h1 q1 n3 k9 d8 append cache_lens=[4,6] left_pad=[1,0]"},
    {"decode b2 k9 d8 cache_lens=[7]", "decode f32 b2 h1 q1 k9 d8 cache_lens=[7]"},
    {"decode k9 d8 cache_lens=[7,8]", "decode f32 b2 h1 q1 k9 d8 cache_lens=[7,8]"},
    {"append bf16 h4 n5 k20 d16/8 page=8 pages=7 v_in_k", "append bf16 b1 h4 n5 k20 d16/8 page=8 pages=7 v_in_k"},
    {"append d8 k4", "append f32 b1 h1 n1 k4 d8"},
    {"decode d8 k100 q2 ring slots=24 mask=window(16,0)&causal",
     "decode f32 b1 h1 q2 k100 d8 slots=24 ring mask=causal@bottom_right&window(16,0)"},
    {"forward b2 d8 k32 page=4 page_table=[0,1,2,3,4,5,6,7,0,1,2,3,8,9,10,11] seqused=k[32,31]",
     "forward f32 b2 h1 q1 k32 d8 page=4 page_table=[0,1,2,3,4,5,6,7,0,1,2,3,8,9,10,11] seqused=k[32,31]"},
    {"decode b2 d8 k32 cache_rows=5 cache_batch_idx=[4,0] status",
     "decode f32 b2 h1 q1 k32 d8 cache_rows=5 cache_batch_idx=[4,0] status"},
    {"decode b2 d8 k32 append rotary=4:half:f32 positions=40 layout=kv",
     "decode f32 b2 h1 q1 k32 d8 layout=kv append rotary=4 positions=40 mask=corner@bottom_right"},
    {"decode bf16 h4 d8 k32 kv=e4m3", "decode bf16 b1 h4 q1 k32 d8 kv=e4m3"},
    {"decode bf16 h4 d8 k32 kv=e4m3:tensor", "decode bf16 b1 h4 q1 k32 d8 kv=e4m3:tensor"},
    {"forward bf16 h4 d8 k32 kv=e4m3:token_head/head", "forward bf16 b1 h4 q1 k32 d8 kv=e4m3:token_head/head"},
    {"decode d8 k32 varlen=q[2,0,1]n[1,1,0] append seqused=n[1,0,0]",
     "decode f32 b3 h1 q2 n1 k32 d8 append varlen=q[2,0,1]n[1,1,0] seqused=n[1,0,0]"},
};

TEST(Line, Goldens) {
  for (const Golden& g : goldens) {
    const Refusal r = refusal([&] {
      const Line line = parse(g.text);
      EXPECT_EQ(print(line), g.printed) << g.text;
      EXPECT_TRUE(same(parse(g.printed), line)) << g.text;
    });
    EXPECT_EQ(r.message, "") << g.text;
  }
}

TEST(Line, ValuesArePrefixSums) {
  const Line line = parse("forward d8 varlen=q[3,0,4]k[1,1,1] seqused=k[1,0,1]");
  EXPECT_EQ(line.values.at(TESSERA_CU_SEQLENS_Q), (std::vector<int32_t>{0, 3, 3, 7}));
  EXPECT_EQ(line.values.at(TESSERA_CU_SEQLENS_K), (std::vector<int32_t>{0, 1, 2, 3}));
  EXPECT_EQ(line.values.at(TESSERA_SEQUSED_K), (std::vector<int32_t>{1, 0, 1}));
  EXPECT_EQ(line.problem.len_q, 4);
  EXPECT_EQ(line.problem.rows_q, 7);
}

class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& content) : path_(testing::TempDir() + "tessera_line_test.txt") {
    std::ofstream(path_) << content;
  }
  ~TemporaryFile() { std::remove(path_.c_str()); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

TEST(Line, ListsMayStandInFiles) {
  const TemporaryFile file("3 0\n129,\n");
  const Line line = parse("forward d8 k200 b3 varlen=q[@" + file.path() + "]");
  EXPECT_EQ(print(line), "forward f32 b3 h1 q129 k200 d8 varlen=q[3,0,129]");
  const TemporaryFile bad("3 x");
  expect_says(refusal([&] { parse("forward d8 varlen=q[@" + bad.path() + "]"); }), TESSERA_INVALID,
              "expected a whole number before \"x\"");
}

// ----------------------------------------------------------------------------------------- parse and print, inverse

struct Random {
  std::mt19937 engine;

  explicit Random(unsigned seed) : engine(seed) {}
  int below(int n) { return static_cast<int>(engine() % static_cast<unsigned>(n)); }
  bool one_in(int n) { return below(n) == 0; }
  template <size_t N>
  std::string of(const char* const (&choices)[N]) {
    return choices[below(N)];
  }
  std::string list(int n, int most) {
    std::string text = "[";
    for (int i = 0; i < n; ++i) text += fmt::format("{}{}", i ? "," : "", below(most + 1));
    return text + "]";
  }
};

// A line with about a third of all options; some are refused, since options constrain each other.
std::string random_line(Random& r) {
  const bool backward = r.one_in(2);
  std::string text = backward ? "backward" : "forward";
  const auto say = [&](const std::string& word) { text += " " + word; };
  const auto number = [](const char* letter, int n) { return letter + std::to_string(n); };
  const int batch = r.below(4), kv = 1 + r.below(3), q = r.below(9), k = r.below(9);
  if (!r.one_in(4)) say(r.of({"f64", "f32", "bf16", "f16"}));
  say(number("b", batch));
  say(number("h", kv * (1 + r.below(3))) + (r.one_in(3) ? number("/", kv) : ""));
  say(number("q", q));
  say(number("k", k));
  say(number("d", 1 + r.below(20)) + (r.one_in(3) ? number("/", 1 + r.below(20)) : ""));
  if (r.one_in(2)) say("layout=" + r.of({"bshd", "bhsd", "qkv", "kv"}));
  if (r.one_in(2)) {
    std::string mask = r.of({"causal", "prefix(3)", "none", "window(4,unbounded)", "window(-1,2)&first(3)",
                             "window(unbounded,0)", "chunk(3)&causal", "window(2,2)&chunk(5)", "corner"});
    if (mask.find('&') == std::string::npos && mask != "none" && r.one_in(2))
      mask += r.of({"@bottom_right", "@top_left", "@at(-2)", "@at"});
    if (r.one_in(3)) mask += r.of({"&keep", "&keep(b,1,q,k)", "&keep(1,h,1,k)", "&keep(b,h,q,1)"});
    if (r.one_in(4)) mask += "&exclude_keys";
    if (r.one_in(4)) mask += "&documents";
    say("mask=" + mask);
  }
  if (r.one_in(4)) say("scale=" + r.of({"0.25", "-3", "0", "0.088388347648318447", "1e-9"}));
  if (r.one_in(4)) say("softcap=" + r.of({"30", "0.1", "50.5"}));
  if (r.one_in(4)) say(r.of({"alibi", "alibi=b,h"}));
  if (r.one_in(4)) say("sink");
  if (r.one_in(4))
    say("bias=" + r.of({"1,1,q,k", "b,h,q,k", "1,h,1,k", "1,1,1,1"}) + r.of({"", ":f32", ":f64", ":bf16", ":f16"}));
  if (r.one_in(4)) say("dropout=" + r.of({"0.1", "0.5", "0"}) + r.of({"", "@seed7", "@seed18446744073709551615"}));
  const bool packed_q = r.one_in(4), packed_k = r.one_in(4);
  if (packed_q || packed_k) {
    const bool values = r.one_in(2);
    const auto side = [&](const char* letter, int most) { return letter + (values ? r.list(batch, most) : ""); };
    say("varlen=" + (packed_q ? side("q", q) : "") + (packed_k ? side("k", k) : ""));
    if (!values || r.one_in(3)) say("rows=" + std::string(packed_q ? "q40" : "") + (packed_k ? "k50" : ""));
  }
  if (r.one_in(5)) say("seqused=" + r.of({"qk", "q", "k"}));
  else if (r.one_in(5)) say("seqused=q" + r.list(batch, q) + "k" + r.list(batch, k));
  if (r.one_in(6)) say("out=" + r.of({"f32", "f64"}));
  if (backward ? r.one_in(3) : false) say("dlse");
  if (backward && r.one_in(3)) say("grads=" + r.of({"dq", "dk,dv", "dq,dk,dv", "dq,dbias", "dsinks", "dslopes,dq"}));
  if (!backward && r.one_in(4)) say("max");
  if (!backward && r.one_in(5)) say("nolse");
  for (const char* flag : {"deterministic", "batch_invariant", "allow_tf32", "align=64"})
    if (r.one_in(6)) say(flag);
  return text;
}

TEST(Line, ParseAndPrintAreInverse) {
  Random r(2027);
  int accepted = 0;
  for (int n = 0; n < 12000; ++n) {
    const std::string text = random_line(r);
    Line line;
    if (const Refusal refused = refusal([&] { line = parse(text); }); refused.code != TESSERA_OK) {
      EXPECT_EQ(refused.code, TESSERA_INVALID);
      EXPECT_FALSE(refused.message.empty());
      continue;
    }
    ++accepted;
    // Inputs may be any view: strides of 0, padded or transposed.
    if (r.one_in(3))
      for (const int name : {TESSERA_Q, TESSERA_V, TESSERA_BIAS})
        for (int d = 0; d < 4; ++d)
          if (has(line.problem, name) && r.one_in(2)) line.problem.operand[name].stride[d] = r.below(5000);
    const std::string printed = print(line);
    const Refusal again = refusal([&] {
      const Line back = parse(printed);
      EXPECT_TRUE(same(back, line)) << text << "\n" << printed << "\n" << print(back);
      EXPECT_EQ(print(back), printed);
    });
    ASSERT_EQ(again.message, "") << text << "\n" << printed;
    EXPECT_FALSE(printed.empty());
  }
  EXPECT_GE(accepted, 2000);
}

// --------------------------------------------------------------------------------------------------- every sentence

struct Wrong {
  const char *text, *says;
};
constexpr Wrong wrongs[] = {
    {"", "the line is empty; it begins with forward, backward, decode or append"},
    {"   # nothing", "the line is empty"},
    {"sideways d8", "\"sideways\": a line begins with forward, backward, decode or append"},
    {"forward b2", "the head dim is not said"},
    {"forward d8 fast", "\"fast\": unknown; a word is a dtype"},
    {"forward d8 causal", "\"causal\": unknown; parts of the mask are said as mask=causal"},
    {"forward d8 bias", "bias takes a value, as in bias=..."},
    {"forward d", "d takes a whole number, as in d64"},
    {"forward d8 mask=none&causal", "none stands alone"},
    {"forward d8 mask=causal&none", "none stands alone"},
    {"forward d8 varlen=q[3,4]k[3,2] q2", "cu_seqlens_q makes sequence 0 3 long; len_q promised at most 2"},
    {"forward d8 k4 seqused=k[9]", "seqused_k[0] is 9; it must be from 0 to the sequence's 4 rows"},
    {"forward d8 b-3 b4", "said twice"},
    {"forward d8 speed=9", "\"speed=\" is unknown"},
    {"forward d8 d16", "\"d16\": d is said twice"},
    {"forward d8 q3 q4", "\"q4\": q is said twice"},
    {"forward d8 mask=causal mask=causal", "mask is said twice"},
    {"forward d8 sink sink", "sink is said twice"},
    {"forward f32 f16 d8", "\"f16\": the dtype is said twice"},
    {"forward i32 d8", "dtype is \"i32\"; it must be f64, f32, bf16 or f16"},
    {"forward d8 out=e4m3", "dtype is \"e4m3\"; it must be"},
    {"forward d8x", "\"x\" is left over"},
    {"forward d8 q3,5", "\",5\" is left over"},
    {"forward d8 q99999999999999999999", "a whole number does not fit its type"},
    {"forward d8 scale=1e999", "a number does not fit its type"},
    {"forward d8 dropout=0.1@seed99999999999999999999", "a seed does not fit its type"},
    {"forward d8 dropout=0.1@seed-1", "expected a seed before \"-1\""},
    {"forward d8 scale=big", "expected a number before \"big\""},
    {"forward d8 softcap=", "expected a number before \"\""},
    {"forward d8 align=", "expected a whole number before \"\""},
    {"forward d8 align=24", "alignment is 24"},
    {"forward d8/", "expected a whole number before \"\""},
    {"forward d8 h4/x", "expected a whole number before \"x\""},
    {"forward d8 layout=sbhd", "layout is \"sbhd\"; it must be one of bshd, bhsd, qkv, kv"},
    {"forward d8 mask=causal@middle", "corner is \"middle\"; it must be one of bottom_right, top_left, at"},
    {"forward d8 mask=causal@unset", "corner is \"unset\""},
    {"forward d8 mask=causal@at(2", "expected \")\" before \"\""},
    {"forward d8 mask=causal@top_left&window(1,1)@top_left", "the corner is said twice"},
    {"forward d8 mask=causal&causal", "causal is said twice"},
    {"forward d8 mask=window(1,1)&window(2,2)", "window is said twice"},
    {"forward d8 mask=causal&", "\"\" is not a mask part"},
    {"forward d8 mask=diagonal", "\"diagonal\" is not a mask part; it must be none, causal"},
    {"forward d8 mask=window(1)", "expected \",\" before \")\""},
    {"forward d8 mask=window(1,", "expected a whole number before \"\""},
    {"forward d8 mask=window 1", "expected \"(\" before \"\""},
    {"forward d8 mask=chunk(0)", "chunk is 0; it must be at least 1"},
    {"forward d8 mask=prefix(-1)", "prefix is -1; it must be at least 0"},
    {"forward d8 mask=window(1,1)&first(0)", "first is 0; it must be at least 1"},
    {"forward d8 mask=first(2)", "mask.first is 2 without a window"},
    {"forward d8 mask=causal&prefix(2)", "mask says causal and prefix(2)"},
    {"forward d8 mask=keep(1,1,k,q)", "dimension 3 must be 1 or q, in the order b,h,q,k"},
    {"forward d8 bias=2,h,q,k", "dimension 1 must be 1 or b"},
    {"forward d8 bias=1,h,q", "expected \",\" before \"\""},
    {"forward d8 bias=1,h,q,k:i8", "dtype is \"i8\""},
    {"forward d8 alibi=h", "\"h\" is left over"},
    {"forward d8 strides=z[1,1,1,1]", "\"z\" is not an operand"},
    {"forward d8 strides=q[1,1,1]", "q has 3 strides; give 4"},
    {"forward d8 strides=q[1,1,1,1]q[1,1,1,1]", "q is said twice"},
    {"forward d8 strides=q", "expected \"[\" before \"\""},
    {"forward d8 strides=bias[1,1,1,1]", "strides has bias but the line does not"},
    {"forward d8 varlen=", "say q, k, n or several"},
    {"forward d8 varlen=z[1]", "say q, k, n or several"},
    {"forward d8 varlen=q[1,2", "expected \"]\" before \"\""},
    {"forward d8 varlen=q[1,,2]", "expected a whole number before \",2]\""},
    {"forward d8 varlen=q[1 2]", "expected \"]\" before \"\""},
    {"forward d8 varlen=q[3000000000]", "3000000000 is out of range; lengths are int32"},
    {"forward d8 varlen=q[-1]", "varlen=q has the length -1"},
    {"forward d8 varlen=k[2147483647,2]", "varlen=k has more than 2^31 - 1 rows"},
    {"forward d8 varlen=q[@no/such/file]", "file \"no/such/file\" cannot be read"},
    {"forward d8 varlen=q[@/]", "file \"/\" cannot be read"},
    {"forward d8 varlen=q[@", "file \"\" cannot be read"},
    {"forward d8 varlen=q[1,2]k[1]", "varlen=k gives 1 sequences and the batch is 2"},
    {"forward b3 d8 varlen=q[1,2]", "varlen=q gives 2 sequences and the batch is 3"},
    {"forward b3 d8 seqused=k[1,1]", "seqused=k gives 2 sequences and the batch is 3"},
    {"forward b3 d8 mask=causal@at[1,1]", "@at gives 2 sequences and the batch is 3"},
    {"forward b2 q3 d8 varlen=q", "varlen=q has no list; say q (the longest length) and rows=q besides"},
    {"forward d8 rows=q9", "rows=q is said but q is not packed"},
    {"forward d8 rows=", "say q, k, n or several"},
    {"forward d8 dlse", "dlse and grads belong to backward lines"},
    {"forward d8 grads=dq", "dlse and grads belong to backward lines"},
    {"backward d8 grads=q", "q is not a gradient"},
    {"backward d8 grads=", "\"\" is not an operand"},
    {"backward d8 grads=dbias", "grads has dbias but the line has no bias"},
    {"backward d8 nolse", "lse is absent; backward needs it"},
    {"backward d8 max", "max_score is given; backward has no use for it"},
    {"forward d8 b-3", "b is -3; it must be from 0 to 2^31 - 1"},
    {"forward d8 q4294967296", "q is 4294967296; it must be from 0"},
    {"forward d2147483647 q2147483647", "the tensors have 1.84e+19 elements; they must stay below 2^58"},
    {"forward d0", "dim is 0; it must be from 1"},
    {"forward d8 h0", "heads_q is 0; it must be from 1"},
    {"forward d8 h6/4", "heads_q is 6 and heads_kv is 4"},
    {"forward d8 dropout=1", "dropout is 1; it must be at least 0 and below 1"},
    {"forward d8 scale=nan", "scale is nan; it must be finite"},
    {"forward d8 softcap=-2", "softcap is -2"},
};

TEST(Line, EverySentence) {
  for (const Wrong& w : wrongs) expect_says(refusal([&] { parse(w.text); }), TESSERA_INVALID, w.says);
}

// ------------------------------------------------------------------------------------------------------- malformed

// Whatever stands in a line, it is a problem or it is refused in words.
void expect_survives(const std::string& text) {
  const Refusal r = refusal([&] { print(parse(text)); });
  EXPECT_TRUE(r.code == TESSERA_OK || (r.code == TESSERA_INVALID && !r.message.empty())) << text;
}

TEST(Line, MalformedLinesAreRefusedInWords) {
  using namespace std::string_literals;
  for (const std::string& text : {"forward d8 \0q3"s,
                                  "\0"s,
                                  "forward\0 d8"s,
                                  "forward d8 caf\xC3\xA9"s,
                                  "\xFF\xFE"s,
                                  "forward d8 q\xE2\x91\xA0"s,
                                  "forward d8 mask=\x80"s,
                                  std::string(1 << 20, 'a'),
                                  "forward d8 " + std::string(1 << 20, '9'),
                                  "forward d8 q" + std::string(1000, '9'),
                                  "forward d8 scale=" + std::string(5000, '9') + "x",
                                  "forward d8 mask=" + std::string(100000, '&'),
                                  "forward d8 varlen=q" + std::string(100000, '['),
                                  "="s,
                                  "=="s,
                                  "forward ="s,
                                  "forward d8 =3"s,
                                  "forward d8 b"s,
                                  "forward d8 -3"s,
                                  "forward d"s,
                                  "forward d-"s,
                                  "forward d8 mask"s,
                                  "forward d8 mask=(((("s,
                                  "forward d8 mask=@"s,
                                  "forward d8 mask=none@top_left"s}) {
    const Refusal r = refusal([&] { parse(text); });
    EXPECT_EQ(r.code, TESSERA_INVALID) << text.substr(0, 80);
    EXPECT_FALSE(r.message.empty());
  }
}

TEST(Line, SurvivesEveryCutAndEveryChangedByte) {
  for (const Golden& g : goldens) {
    const std::string text = g.text;
    for (size_t n = 0; n <= text.size(); ++n) expect_survives(text.substr(0, n));
    for (size_t n = 0; n < text.size(); ++n)
      for (const char c : {' ', '9', '-', ',', '[', ')', '=', '&', '@', 'k', '\0', '\xFF'}) {
        std::string changed = text;
        changed[n] = c;
        expect_survives(changed);
      }
  }
}

TEST(Line, SurvivesWordsInAnyOrder) {
  Random r(5);
  std::vector<std::string> words;
  for (const Golden& g : goldens)
    for (const char* list : {g.text, g.printed}) {
      std::istringstream in(list);
      for (std::string word; in >> word;) words.push_back(word);
    }
  for (int n = 0; n < 20000; ++n) {
    std::string text = r.one_in(2) ? "forward d8" : "backward";
    for (int i = r.below(6); i >= 0; --i)
      text += " " + words[static_cast<size_t>(r.below(static_cast<int>(words.size())))];
    expect_survives(text);
  }
}

TEST(Line, AListFileOfAnySizeIsNotRead) {
  const std::string file = testing::TempDir() + "tessera_long_list";
  std::ofstream(file).close();
  std::filesystem::resize_file(file, (uintmax_t{1} << 26) + 1);  // sparse
  expect_says(refusal([&] { parse("forward d8 varlen=q[@" + file + "]"); }), TESSERA_INVALID,
              "has 67108865 bytes; lists are read up to 67108864");
  std::filesystem::remove(file);
}

}  // namespace
}  // namespace tessera::core
