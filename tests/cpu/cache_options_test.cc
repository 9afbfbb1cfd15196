// Every option of a cache changes the answer, or provably must not: none is accepted and dropped.
#include "engine.h"

namespace tessera::test {
namespace {

struct Row {
  const char* base;
  const char* changed;
  int result;  // that must differ; k for what is appended
};

constexpr const char* line = "decode bf16 b2 h4/2 d8 q3 k40 append mask=causal";
const Row rows[] = {
    {"cache_lens=[30]", "cache_lens=[31]", TESSERA_OUT},
    {"cache_lens=[30,30]", "cache_lens=[30,31]", TESSERA_OUT},
    {"n3", "n2", TESSERA_OUT},
    {"", "seqused=n[3,2]", TESSERA_OUT},
    {"", "seqused=q[3,2]", TESSERA_OUT},
    {"", "varlen=n[3,2]", TESSERA_OUT},
    {"left_pad=[0,0]", "left_pad=[0,1]", TESSERA_OUT},
    {"cache_rows=3 cache_batch_idx=[0,1]", "cache_rows=3 cache_batch_idx=[0,2]", TESSERA_OUT},
    {"page=20 page_table=[0,1,2,3]", "page=20 page_table=[0,1,3,2]", TESSERA_OUT},
    {"page=20", "page=10", TESSERA_OUT},
    {"rotary=4", "rotary=6", TESSERA_OUT},
    {"rotary=4", "rotary=6", TESSERA_K},
    {"rotary=4", "rotary=4:interleaved", TESSERA_OUT},
    {"rotary=4", "rotary=4:interleaved", TESSERA_K},
    {"", "rotary=4", TESSERA_K},
    {"", "kv=e4m3", TESSERA_OUT},
    {"kv=e4m3", "kv=e4m3:tensor", TESSERA_OUT},
    {"kv=e4m3:tensor", "kv=e4m3:head", TESSERA_OUT},
    {"kv=e4m3:head", "kv=e4m3:token", TESSERA_OUT},
    {"kv=e4m3:token", "kv=e4m3:token_head", TESSERA_OUT},
    {"kv=e4m3:head", "kv=e4m3:head/token", TESSERA_OUT},
    {"", "v_in_k", TESSERA_OUT},
};

std::vector<double> numbers(const std::string& options, int result) {
  tools::Case c = make_case(fmt::format("{} {}", line, options), 1, false);
  run_all(c, {"cpu", 1});
  expect_right(c, options);
  std::vector<double> all;
  const auto add = [&](int name, const tools::Index& i) {
    uint16_t bits = 0;
    std::memcpy(&bits, c.at(name, i), tessera_dtype_bytes(c.operand(name).dtype));
    all.push_back(bits);
  };
  if (result == TESSERA_OUT)
    tools::for_each_index(tools::extents(c.operand(TESSERA_OUT)), [&](const tools::Index& i) { add(TESSERA_OUT, i); });
  else
    tools::for_each_new(c, [&](int name, const tools::Index& i) {
      if (name == result) add(name, i);
    });
  return all;
}

TEST(CacheOptions, EachChangesTheAnswer) {
  for (const Row& row : rows)
    EXPECT_NE(numbers(row.base, row.result), numbers(row.changed, row.result)) << row.base << " | " << row.changed;
}

}  // namespace
}  // namespace tessera::test
