// Every sentence with which check refuses, and what it does not refuse.
#include "core/check.h"

#include <cmath>
#include <functional>

#include "core/line.h"
#include "refusal.h"

namespace tessera::core {
namespace {

struct Row {
  const char* line;
  std::function<void(Problem&)> spoil;
  const char* says;
};

constexpr const char* plain = "forward f32 b2 h4/2 q3 k5 d8/6";
constexpr const char* back = "backward bf16 b2 h4/2 q3 k5 d8 bias=1,h,q,k";
constexpr const char* ragged = "forward f32 h4/2 d8 varlen=q[3,2]k[5,1]";
constexpr int64_t too_many = int64_t{1} << 31;

const Row rows[] = {
    {plain, [](Problem& p) { p.pass = 7; }, "pass is 7; it must be forward (0), backward (1) or append (2)"},
    {plain, [](Problem& p) { p.batch = -1; }, "batch is -1; it must be from 0 to 2147483647"},
    {plain, [](Problem& p) { p.batch = too_many; }, "batch is 2147483648; it must be from 0"},
    {plain, [](Problem& p) { p.heads_q = 0; }, "heads_q is 0; it must be from 1"},
    {plain, [](Problem& p) { p.heads_kv = 0; }, "heads_kv is 0; it must be from 1"},
    {plain, [](Problem& p) { p.len_q = -3; }, "len_q is -3; it must be from 0"},
    {plain, [](Problem& p) { p.len_k = too_many; }, "len_k is 2147483648; it must be from 0"},
    {plain, [](Problem& p) { p.dim = 0; }, "dim is 0; it must be from 1"},
    {plain, [](Problem& p) { p.dim_v = -2; }, "dim_v is -2; it must be from 1"},
    {plain, [](Problem& p) { p.rows_q = -2; }, "rows_q is -2; it must be from 0"},
    {plain, [](Problem& p) { p.rows_k = -2; }, "rows_k is -2; it must be from 0"},
    {plain, [](Problem& p) { p.heads_kv = 3; },
     "heads_q is 4 and heads_kv is 3; query heads must divide into equal groups"},
    {plain, [](Problem& p) { p.rows_q = 9; }, "rows_q is 9 but q is not packed; declare cu_seqlens_q"},
    {plain, [](Problem& p) { p.rows_k = 9; }, "rows_k is 9 but k is not packed; declare cu_seqlens_k"},
    {plain, [](Problem& p) { p.batch = p.len_q = too_many - 1; },
     "batch * heads_q * length is 1.84e+19; it must stay below 2^56"},
    {plain, [](Problem& p) { p.dropout = 0.1, p.heads_q = 4, p.batch = 1 << 30; },
     "batch * heads_q is 1073741824 x 4; dropout counts them in 32 bits"},
    {plain, [](Problem& p) { p.alignment = 24; }, "alignment is 24; it must be a power of two"},
    {plain, [](Problem& p) { p.alignment = -16; }, "alignment is -16; it must be a power of two"},
    {plain, [](Problem& p) { p.has_scale = 1, p.scale = INFINITY; }, "scale is inf; it must be finite"},
    {plain, [](Problem& p) { p.has_scale = 1, p.scale = NAN; }, "scale is nan; it must be finite"},
    {plain, [](Problem& p) { p.has_scale = 1, p.scale = 1e39; }, "scale is 1e+39; it must fit f32"},
    {plain, [](Problem& p) { p.softcap = 1e39; }, "softcap is 1e+39; it and its inverse must fit f32"},
    {plain, [](Problem& p) { p.softcap = 1e-39; }, "softcap is 1e-39; it and its inverse must fit f32"},
    {plain, [](Problem& p) { p.softcap = -30; }, "softcap is -30; it must be finite and positive"},
    {plain, [](Problem& p) { p.softcap = NAN; }, "softcap is nan; it must be finite"},
    {plain, [](Problem& p) { p.dropout = 1; }, "dropout is 1; it must be at least 0 and below 1"},
    {plain, [](Problem& p) { p.dropout = -0.5; }, "dropout is -0.5; it must be"},
    {plain, [](Problem& p) { p.dropout = NAN; }, "dropout is nan; it must be"},
    {plain, [](Problem& p) { p.mask.corner = 4; }, "mask.corner is 4; it must be a tessera_corner (0 to 3)"},
    {plain, [](Problem& p) { p.mask.causal = 1; },
     "mask.corner is unset, but causal, window, chunk, prefix, slopes and rotary depend"},
    {plain, [](Problem& p) { p.mask.has_window = 1; }, "mask.corner is unset"},
    {plain, [](Problem& p) { p.mask.has_prefix = 1; }, "mask.corner is unset"},
    {plain, [](Problem& p) { p.mask.chunk = 3; }, "mask.corner is unset"},
    {plain, [](Problem& p) { declare(p, TESSERA_SLOPES, TESSERA_F32, TESSERA_BSHD); }, "mask.corner is unset"},
    {plain, [](Problem& p) { p.mask.corner = TESSERA_CORNER_AT, p.mask.corner_at = too_many; },
     "mask.corner_at is 2147483648; like corner_offsets it must fit an int32"},
    {"forward d8 mask=prefix(4)", [](Problem& p) { p.mask.causal = 1; }, "mask says causal and prefix(4)"},
    {"forward d8 mask=prefix(4)", [](Problem& p) { p.mask.prefix = -1; }, "mask.prefix is -1; it must be at least 0"},
    {"forward d8 mask=chunk(4)", [](Problem& p) { p.mask.chunk = -4; }, "mask.chunk is -4; it must be at least 1"},
    {"forward d8 mask=window(4,0)", [](Problem& p) { p.mask.first = -1; }, "mask.first is -1; it must be at least 1"},
    {"forward d8 mask=causal", [](Problem& p) { p.mask.first = 2; }, "mask.first is 2 without a window"},
    {plain, [](Problem& p) { p.mask.corner = 1, declare(p, TESSERA_CORNER_OFFSETS, TESSERA_I32, TESSERA_BSHD); },
     "corner_offsets is given but mask.corner is 1; say at (3)"},
    {plain, [](Problem& p) { declare(p, TESSERA_DOCUMENTS_Q, TESSERA_I32, TESSERA_BSHD); },
     "only one of documents_q and documents_k is given"},
    {plain, [](Problem& p) { p.operand[TESSERA_Q].dtype = TESSERA_I32; },
     "q.dtype is i32; it must be f64, f32, bf16 or f16"},
    {plain, [](Problem& p) { p.operand[TESSERA_K].dtype = TESSERA_BF16; }, "k.dtype is bf16; it must be q's, f32"},
    {plain, [](Problem& p) { p.operand[TESSERA_OUT].dtype = TESSERA_BF16; },
     "out.dtype is bf16; it must be q's, f32, or the accumulation type, f32"},
    {plain, [](Problem& p) { p.operand[TESSERA_LSE].dtype = TESSERA_F64; }, "lse.dtype is f64; it must be f32"},
    {"forward d8 mask=keep", [](Problem& p) { p.operand[TESSERA_KEEP].dtype = TESSERA_I32; },
     "keep.dtype is i32; it must be bool"},
    {"forward d8 mask=documents", [](Problem& p) { p.operand[TESSERA_DOCUMENTS_K].dtype = TESSERA_F32; },
     "documents_k.dtype is f32; it must be i32"},
    {back, [](Problem& p) { p.operand[TESSERA_DQ].dtype = TESSERA_F32; }, "dq.dtype is f32; it must be q's, bf16"},
    {plain, [](Problem& p) { p.operand[TESSERA_Q].dtype = 99; }, "q.dtype is 99; it must be a tessera_dtype (0 to 7)"},
    {plain, [](Problem& p) { p.operand[TESSERA_V].dtype = -1; }, "v.dtype is -1; it must be a tessera_dtype"},
    {plain, [](Problem& p) { p.operand[TESSERA_K].extent[1] = 4; }, "k.extent[1] (sequence) is 4; it must be 5"},
    {plain, [](Problem& p) { p.operand[TESSERA_Q].extent[0] = 1; }, "q.extent[0] (batch) is 1; it must be 2"},
    {back, [](Problem& p) { p.operand[TESSERA_BIAS].extent[1] = 3; }, "bias.extent[1] (head) is 3; it must be 1 or 4"},
    {ragged, [](Problem& p) { p.operand[TESSERA_CU_SEQLENS_Q].extent[0] = 2; },
     "cu_seqlens_q.extent[0] (batch) is 2; it must be 3"},
    {plain, [](Problem& p) { p.operand[TESSERA_Q].stride[1] = -1; },
     "q.stride[1] is -1; over 3 elements it must stay from 0 to 2^58"},
    {plain, [](Problem& p) { p.operand[TESSERA_Q].stride[0] = int64_t{1} << 60; },
     "q.stride[0] is 1152921504606846976; over 2 elements"},
    {plain,
     [](Problem& p) {
       p.operand[TESSERA_Q].stride[0] = p.operand[TESSERA_Q].stride[2] = int64_t{1} << 56,
       p.operand[TESSERA_Q].stride[1] = int64_t{1} << 56;
     },
     "q spans 432345564227567624 elements; it must stay below 2^58"},
    {back, [](Problem& p) { p.operand[TESSERA_DBIAS].extent[1] = 1; },
     "dbias.extent[1] is 1 and bias's is 4; they must be equal"},
    {plain, [](Problem& p) { p.operand[TESSERA_OUT].stride[2] = 0; }, "out has stride 0 over 4 elements"},
    {back, [](Problem& p) { p.operand[TESSERA_DK].stride[1] = 1; }, "elements of an output must not share addresses"},
    {plain, [](Problem& p) { p.operand[40].dtype = TESSERA_F32; },
     "operand[40] is given; this library knows 39 operands"},
    {plain, [](Problem& p) { p.operand[TESSERA_V].dtype = TESSERA_ABSENT; }, "v is absent; forward needs it"},
    {plain, [](Problem& p) { p.operand[TESSERA_OUT].dtype = TESSERA_ABSENT; }, "out is absent; forward needs it"},
    {back, [](Problem& p) { p.operand[TESSERA_DOUT].dtype = TESSERA_ABSENT; }, "dout is absent; backward needs it"},
    {plain, [](Problem& p) { declare(p, TESSERA_DQ, TESSERA_F32, TESSERA_BSHD); },
     "dq is given; forward has no use for it"},
    {back, [](Problem& p) { declare(p, TESSERA_MAX_SCORE, TESSERA_F32, TESSERA_BSHD); },
     "max_score is given; backward has no use for it"},
    {back, [](Problem& p) { declare(p, TESSERA_DSINKS, TESSERA_F32, TESSERA_BSHD); }, "dsinks is given without sinks"},
    {ragged, [](Problem& p) { p.operand[TESSERA_CU_SEQLENS_K].stride[0] = 2; },
     "cu_seqlens_k.stride[0] is 2; lists of lengths must be dense"},
    {"backward d8",
     [](Problem& p) {
       for (const int name : {TESSERA_DQ, TESSERA_DK, TESSERA_DV}) p.operand[name] = {};
     },
     "no gradient is declared; backward would compute nothing"},
};

TEST(Check, EverySentence) {
  for (const Row& row : rows) {
    Problem p = parse(row.line).problem;
    row.spoil(p);
    expect_says(refusal([&] { check(p); }), TESSERA_INVALID, row.says);
  }
}

TEST(Check, AcceptsWhatIsOdd) {
  for (const char* line :
       {"forward d1", "forward b0 d8", "forward q0 k0 d8", "backward q0 k5 d8", "backward b0 q3952 k16 h10 d64",
        "forward h4 d8 strides=k[0,0,0,0]", "forward d8 mask=window(-3,1)", "forward d8 mask=window(2,-5)",
        "forward d8 mask=window(9223372036854775807,-9223372036854775808)", "forward d8 mask=prefix(0)",
        "forward d8 scale=0", "forward d8 scale=-1", "forward d8 dropout=0", "forward f64 d8 out=f64",
        "forward q2147483647 k2147483647 h4 d8", "forward d8 mask=corner@at(-5)"})
    EXPECT_EQ(refusal([&] { parse(line); }).message, "") << line;
}

TEST(Check, StridesOfSingleElementsAreIgnored) {
  Problem p = parse("forward b1 q1 k5 h4/1 d8").problem;
  p.operand[TESSERA_Q].stride[0] = p.operand[TESSERA_OUT].stride[0] = -1;
  p.operand[TESSERA_K].stride[2] = INT64_MAX;
  EXPECT_EQ(refusal([&] { check(p); }).message, "");
}

// Sizes whose products do not fit 64 bits are refused, whatever is declared with them.
TEST(Check, ProductsNeverWrap) {
  constexpr const char* huge[] = {
      "forward h4 q2147483647 k2147483647 d1 bias=1,h,q,k", "forward h4 q2147483647 k2147483647 d1 mask=keep(1,h,q,k)",
      "backward b3 h4 q2147483647 k2147483647 d1 bias=b,h,q,k", "forward h2147483647 q1 k1 d2147483647 layout=qkv",
      "forward b2147483647 q2147483647 k1 d8"};
  for (const char* line : huge) EXPECT_EQ(refusal([&] { parse(line); }).code, TESSERA_INVALID) << line;
  Problem p = {};
  p.batch = p.heads_q = p.heads_kv = p.len_q = p.len_k = p.dim = p.dim_v = INT32_MAX;
  for (const int layout : {TESSERA_BSHD, TESSERA_BHSD, TESSERA_QKV, TESSERA_KV}) {
    for (int name = 0; name < TESSERA_NAMES; ++name) declare(p, name, TESSERA_F32, layout);
    EXPECT_EQ(refusal([&] { check(p); }).code, TESSERA_INVALID);
  }
}

}  // namespace
}  // namespace tessera::core
