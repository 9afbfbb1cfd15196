// Caches: every sentence of their checks, of the problem and of the metadata that a run meets.
#include <cstring>

#include "core/check.h"
#include "core/line.h"
#include "core/sequence.h"
#include "refusal.h"

namespace tessera::core {
namespace {

struct Row {
  const char* line;
  void (*spoil)(Problem&);
  const char* says;
};

constexpr const char* plain = "forward f32 b2 h4/2 q3 k5 d8";
constexpr const char* decode = "decode f32 b2 h4/2 q1 k8 d8 append";
constexpr const char* paged = "decode f32 b2 h4/2 q1 k8 d8 append page=4";
constexpr const char* ring = "decode f32 h2 q2 k100 d8 append ring slots=24 mask=causal&window(20,0)";
constexpr const char* latent = "decode f32 h4/1 q1 k8 d8/4 append v_in_k";
constexpr const char* turning = "decode f32 b2 h4/2 q1 k8 d8 append rotary=4";
constexpr const char* quantised = "decode bf16 b2 h4/2 q1 k8 d8 kv=e4m3:token/head";

const Row rows[] = {
    {decode, [](Problem& p) { p.len_new = -1; }, "len_new is -1; it must be from 0"},
    {decode, [](Problem& p) { p.rows_new = 3; }, "rows_new is 3 but k_new is not packed"},
    {decode, [](Problem& p) { p.cache.slots = -1; }, "cache has a negative size"},
    {decode, [](Problem& p) { p.cache.rows = int64_t{1} << 31; }, "cache has a size over 2^31 - 1"},
    {decode, [](Problem& p) { p.cache.page_size = 4; }, "cache.page_size is 4 and page_table is absent"},
    {paged, [](Problem& p) { p.operand[TESSERA_PAGE_TABLE].dtype = TESSERA_ABSENT; },
     "cache.page_size is 4 and page_table is absent"},
    {decode, [](Problem& p) { p.cache.pages = 4; }, "cache.pages is 4 without page_size"},
    {decode,
     [](Problem& p) {
       p.cache.rows = 3;
       for (const int name : {TESSERA_K, TESSERA_V}) declare(p, name, TESSERA_F32, TESSERA_BSHD);
     },
     "cache.rows is 3 and the batch 2; say which rows they are by cache_batch_idx"},
    {decode, [](Problem& p) { p.pass = TESSERA_BACKWARD; }, "k_new is given; backward has no use for it"},
    {decode, [](Problem& p) { declare(p, TESSERA_SEQUSED_K, TESSERA_I32, TESSERA_BSHD); },
     "cache_lens and seqused_k are both given"},
    {decode,
     [](Problem& p) {
       p.cache.slots = 7;
       for (const int name : {TESSERA_K, TESSERA_V}) declare(p, name, TESSERA_F32, TESSERA_BSHD);
     },
     "len_k is 8 and a sequence has 7 slots; only a ring may be outgrown"},
    {ring, [](Problem& p) { p.operand[TESSERA_CACHE_LENS].dtype = TESSERA_ABSENT; },
     "cache.ring is set without cache_lens"},
    {ring,
     [](Problem& p) {
       p.len_new = 25, declare(p, TESSERA_K_NEW, TESSERA_F32, 0), declare(p, TESSERA_V_NEW, TESSERA_F32, 0);
     },
     "len_new is 25 and the ring has 24 slots"},
    {ring, [](Problem& p) { p.mask.corner = TESSERA_TOP_LEFT; }, "cache.ring needs corner bottom_right"},
    {ring, [](Problem& p) { p.mask.first = 4; }, "cache.ring overwrites the first keys"},
    {ring, [](Problem& p) { p.mask.window_left_unbounded = 1; }, "cache.ring needs a window with a left side"},
    {ring, [](Problem& p) { p.mask.window_left = 23; },
     "the ring has 24 slots; 2 queries that see 23 keys back need 25"},
    {ring, [](Problem& p) { p.mask.window_left = INT64_MAX - 1; }, "the ring has 24 slots"},
    {plain, [](Problem& p) { p.len_new = 2; }, "len_new is 2 but k_new is absent"},
    {plain, [](Problem& p) { p.len_new = 0, declare(p, TESSERA_SEQUSED_NEW, TESSERA_I32, 0); },
     "seqused_new is given without k_new"},
    {decode, [](Problem& p) { p.operand[TESSERA_CACHE_LENS].dtype = TESSERA_ABSENT; },
     "k_new is given without cache_lens"},
    {decode, [](Problem& p) { p.operand[TESSERA_V_NEW].dtype = TESSERA_ABSENT; },
     "v_new is absent and cache.v_in_k is 0"},
    {decode, [](Problem& p) { p.cache.v_in_k = 1; }, "v_new is given and cache.v_in_k is 1"},
    {latent,
     [](Problem& p) {
       p.dim_v = 9;
       for (const int name : {TESSERA_V, TESSERA_OUT}) declare(p, name, TESSERA_F32, 0);
     },
     "dim_v is 9 and dim 8; v lies in the first numbers of k's rows"},
    {latent, [](Problem& p) { p.operand[TESSERA_V].stride[1] = 4; }, "v.stride[1] is 4 and k's is 8; v lies in k"},
    {turning, [](Problem& p) { p.operand[TESSERA_SIN].dtype = TESSERA_ABSENT; }, "only one of cos and sin is given"},
    {decode, [](Problem& p) { p.cache.rotary_dim = 4, p.mask.corner = 1; },
     "cache.rotary_dim is 4 and cos is absent; a rotation needs both"},
    {turning,
     [](Problem& p) {
       p.cache.rotary_dim = 5;
       for (const int name : {TESSERA_COS, TESSERA_SIN}) declare(p, name, TESSERA_F32, 0);
     },
     "cache.rotary_dim is 5; numbers are rotated in pairs, so it must be even"},
    {turning,
     [](Problem& p) {
       p.cache.rotary_dim = 10;
       for (const int name : {TESSERA_COS, TESSERA_SIN}) declare(p, name, TESSERA_F32, 0);
     },
     "cache.rotary_dim is 10; numbers are rotated in pairs, so it must be even, and at most dim, 8"},
    {turning, [](Problem& p) { p.mask.corner = 0; }, "mask.corner is unset"},
    {"decode h4/1 k8 d8 append rotary=4",
     [](Problem& p) { p.cache.v_in_k = 1, p.operand[TESSERA_V_NEW].dtype = TESSERA_ABSENT; },
     "cache.rotary_dim is 4 and v lies in k"},
    {plain,
     [](Problem& p) {
       p.cache.rotary_dim = 4, p.mask.corner = 1;
       for (const int name : {TESSERA_COS, TESSERA_SIN}) declare(p, name, TESSERA_F32, 0);
     },
     "rotary_dim is 4 and k is no cache"},
    {"decode bf16 h2 k8 d8 append rotary=4", [](Problem& p) { p.operand[TESSERA_COS].dtype = TESSERA_F16; },
     "cos.dtype is f16; it must be q's, bf16, or f32"},
    {"decode bf16 h2 k8 d8 append rotary=4", [](Problem& p) { p.operand[TESSERA_COS].dtype = TESSERA_BF16; },
     "cos is bf16 and sin f32; make them one dtype"},
    {quantised, [](Problem& p) { p.operand[TESSERA_V].dtype = TESSERA_BF16; }, "k is e4m3 and v bf16"},
    {quantised, [](Problem& p) { p.operand[TESSERA_V].dtype = p.operand[TESSERA_K].dtype = TESSERA_BF16; },
     "k_scale is given and k is bf16; only e4m3 has a scale"},
    {quantised, [](Problem& p) { p.operand[TESSERA_K_SCALE].extent[1] = 1; },
     "k_scale.extent is 2 x 1 tokens; it must be 1 x 1, or k's, 2 x 8"},
    {quantised, [](Problem& p) { p.operand[TESSERA_K_SCALE].dtype = TESSERA_BF16; }, "k_scale.dtype is bf16"},
    {"backward bf16 d8", [](Problem& p) { p.operand[TESSERA_K].dtype = TESSERA_E4M3; },
     "k.dtype is e4m3; it must be q's, bf16"},
    {paged, [](Problem& p) { p.operand[TESSERA_K].extent[1] = 8; }, "k.extent[1] (sequence) is 8; it must be 4"},
    {paged, [](Problem& p) { p.operand[TESSERA_CACHE_LENS].extent[0] = 4; },
     "cache_lens.extent[0] (batch) is 4; it must be 1 or 2"},
    {decode, [](Problem& p) { p.operand[TESSERA_K].stride[2] = 0; }, "elements of an output must not share addresses"},
    {"append h2 n1 k8 d8", [](Problem& p) { p.heads_q = 4; },
     "heads_q is 4 and heads_kv is 2; an append has no queries"},
    {"append h2 n1 k8 d8", [](Problem& p) { p.operand[TESSERA_K_NEW].dtype = TESSERA_ABSENT; },
     "k_new is absent; append needs it"},
    {"append h2 n1 k8 d8", [](Problem& p) { declare(p, TESSERA_SINKS, TESSERA_F32, 0); },
     "sinks is given; append has no use for it"},
};

TEST(Cache, EverySentenceOfTheProblem) {
  for (const Row& row : rows) {
    Problem p = parse(row.line).problem;
    row.spoil(p);
    expect_says(refusal([&] { check(p); }), TESSERA_INVALID, row.says);
  }
}

TEST(Cache, BackwardAndPackedKeysAreNoCaches) {
  Problem p = parse("backward f32 b2 h4/2 q3 k5 d8").problem;
  p.cache.slots = 5;
  expect_says(refusal([&] { check(p); }), TESSERA_INVALID, "k and v are a cache; backward reads plain tensors");
  p = parse("forward f32 h4/2 d8 varlen=q[3,2]k[5,1]").problem;
  declare(p, TESSERA_LEFT_PAD, TESSERA_I32, TESSERA_BSHD);
  for (const int name : {TESSERA_K, TESSERA_V}) declare(p, name, TESSERA_F32, TESSERA_BSHD);
  expect_says(refusal([&] { check(p); }), TESSERA_INVALID, "cu_seqlens_k is given and k is a cache");
}

// Lines whose lists are complete are checked as a run would.
struct Metadata {
  const char* line;
  const char* says;
  tessera_status status;
};
const Metadata metadata[] = {
    {"decode b2 k9 d8 cache_lens=[10,1]", "cache_lens[0] is 10 and 0 are new; the sequence has 9 slots",
     TESSERA_STATUS_CAPACITY},
    {"decode b2 k9 d8 append cache_lens=[8,9]", "cache_lens[1] is 9 and 1 are new; the sequence has 9 slots",
     TESSERA_STATUS_CAPACITY},
    {"decode b2 k9 d8 cache_lens=[-1,1]", "cache_lens[0] is -1 and left_pad[0] is 0", TESSERA_STATUS_LENGTH},
    {"decode b2 k9 d8 cache_lens=[3,1] left_pad=[1,2]", "cache_lens[1] is 1 and left_pad[1] is 2",
     TESSERA_STATUS_LENGTH},
    {"decode b2 k9 d8 cache_lens=[3,1] left_pad=[-1,0]", "left_pad[0] is -1", TESSERA_STATUS_LENGTH},
    {"decode b2 k9 d8 slots=20 cache_lens=[12,9]", "cache_lens[0] makes 12 keys; len_k promised at most 9",
     TESSERA_STATUS_LENGTH},
    {"decode b2 k9 d8 cache_rows=3 cache_batch_idx=[0,3] cache_lens=[1]",
     "cache_batch_idx[1] is 3; the cache has rows 0 to 2", TESSERA_STATUS_PAGE},
    {"decode b2 k9 d8 cache_rows=3 cache_batch_idx=[0,-1] cache_lens=[1]", "cache_batch_idx[1] is -1",
     TESSERA_STATUS_PAGE},
    {"decode k8 d8 page=4 pages=3 page_table=[0,3] cache_lens=[5]",
     "page_table names page 3 for key 4 of sequence 0; k and v have pages 0 to 2", TESSERA_STATUS_PAGE},
    {"decode k8 d8 append page=4 pages=3 page_table=[0,-1] cache_lens=[4]", "page_table names page -1 for key 4",
     TESSERA_STATUS_PAGE},
    {"decode b2 k9 d8 append varlen=n[1,2] seqused=n[1,3] cache_lens=[1]",
     "seqused_new[1] is 3; it must be from 0 to the sequence's 2 rows", TESSERA_STATUS_LENGTH},
    {"decode k9 d8 append rotary=4 positions=5 cache_lens=[5]",
     "sequence 0: new tokens stand at positions 5 to 5; cos and sin have 0 to 4", TESSERA_STATUS_POSITION},
    {"decode q3 n1 k9 d8 append rotary=4 positions=5 cache_lens=[1]",
     "sequence 0: queries stand at positions -1 to 1; cos and sin have 0 to 4", TESSERA_STATUS_POSITION},
    // What nobody follows may be rubbish.
    {"decode k8 d8 page=4 pages=3 page_table=[2,-7] cache_lens=[4]", "", TESSERA_STATUS_SOUND},
    {"decode k12 d8 page=4 page_table=[-1,-1,2] cache_lens=[12] mask=causal&window(3,0)", "", TESSERA_STATUS_SOUND},
    {"decode q2 k9 d8 append n1 rotary=4 positions=5 cache_lens=[0] seqused=n[0]", "", TESSERA_STATUS_SOUND},
};

TEST(Cache, EverySentenceOfTheMetadata) {
  for (const Metadata& row : metadata) {
    tessera_status status = TESSERA_STATUS_SOUND;
    const Refusal got = refusal([&] {
      try {
        parse(row.line);
      } catch (const Error& e) {
        status = e.status;
        throw;
      }
    });
    if (*row.says) expect_says(got, TESSERA_INVALID, row.says);
    else EXPECT_EQ(got.message, "") << row.line;
    EXPECT_EQ(status, row.status) << row.line;
  }
}

TEST(Cache, TwoTokensForOneSlotAreRefused) {
  const auto targets = [](const char* text) {
    const Line line = parse(text);
    Bindings bound = {};
    for (const auto& [name, values] : line.values) bound.data[name] = const_cast<int32_t*>(values.data());
    std::vector<int64_t> room(static_cast<size_t>(most_targets(line.problem)));
    check_targets(line.problem, bound, room.data());
  };
  expect_says(refusal([&] { targets("append b2 k8 d8 page=4 page_table=[0,1,2,1] cache_lens=[5,5]"); }),
              TESSERA_INVALID, "two new tokens are appended to slot 1 of page 1; each needs a slot of its own");
  expect_says(refusal([&] { targets("append b2 k8 d8 cache_rows=4 cache_batch_idx=[3,3] cache_lens=[5]"); }),
              TESSERA_INVALID, "slot 5 of cache row 3");
  expect_says(refusal([&] { targets("append n3 k8 d8 page=2 page_table=[0,1,0,3] cache_lens=[0] n6"); }),
              TESSERA_INVALID, "said twice");
  expect_says(refusal([&] { targets("append n6 k8 d8 page=2 page_table=[0,1,0,3] cache_lens=[0]"); }), TESSERA_INVALID,
              "slot 0 of page 0");
  // Shared pages may be read, and even be appended to at different slots.
  EXPECT_EQ(refusal([&] { targets("append b2 k8 d8 page=4 page_table=[0,1,0,1] cache_lens=[5,6]"); }).message, "");
}

// The map of keys to slots, by the definition in contract section 7.
TEST(Cache, SlotsOfEveryKind) {
  const auto slots = [](const Line& line, int64_t b) {
    Bindings bound = {};
    for (const auto& [name, values] : line.values) bound.data[name] = const_cast<int32_t*>(values.data());
    const Sequence s = sequence(line.problem, bound, b);
    std::string text;
    for (int64_t j = 0; j < s.k.used;) {
      const rules::Run run = s.slots.run(j, s.k.used);
      text += fmt::format("{}:{}+{} ", run.plane, run.row, run.count);
      j += run.count;
    }
    return text;
  };
  const Line padded = parse("decode b2 k6 d8 slots=9 cache_lens=[5,8] left_pad=[0,3]");
  EXPECT_EQ(slots(padded, 0), "0:0+5 ");
  EXPECT_EQ(slots(padded, 1), "1:3+5 ");
  const Line pages = parse("decode b2 k6 d8 page=4 pages=9 page_table=[7,2,8,0] cache_lens=[6,5] left_pad=[0,3]");
  EXPECT_EQ(slots(pages, 0), "7:0+4 2:0+2 ");
  EXPECT_EQ(slots(pages, 1), "8:3+1 0:0+1 ");
  const Line rings = parse("decode k12 d8 ring slots=5 cache_lens=[12] mask=causal&window(3,0)");
  EXPECT_EQ(slots(rings, 0), "0:0+5 0:0+5 0:0+2 ");
  const Line rows = parse("decode k4 d8 cache_rows=3 cache_batch_idx=[2] cache_lens=[3]");
  EXPECT_EQ(slots(rows, 0), "2:0+3 ");
}

}  // namespace
}  // namespace tessera::core
