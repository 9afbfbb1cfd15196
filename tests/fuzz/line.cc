// Bytes as a problem line. What parses is sound, printing and parsing are inverse, and a plan is made of it or refused.
#include <algorithm>
#include <memory>

#include "fuzz.h"

namespace tessera::fuzz {
namespace {

struct Free {
  void operator()(tessera_line* line) const { tessera_line_free(line); }
  void operator()(tessera_plan* plan) const { tessera_plan_free(plan); }
};
using Line = std::unique_ptr<tessera_line, Free>;
using Plan = std::unique_ptr<tessera_plan, Free>;

tessera_error fresh_error() {
  tessera_error error = {};
  error.size = sizeof error;
  return error;
}

Line parse(const std::string& text, std::string& why) {
  tessera_line* line = nullptr;
  tessera_error error = fresh_error();
  const int32_t code = tessera_line_parse(text.c_str(), &line, &error);
  need(code == TESSERA_OK || code == TESSERA_INVALID, "parse gave {}: {}", code, error.message);
  need((line != nullptr) == (code == TESSERA_OK), "parse gave {} and {} line", code, line ? "a" : "no");
  why = error.message;
  return Line(line);
}

std::string text_of(const tessera_line* line) {
  return printed([&](char* buffer, size_t capacity) { return tessera_line_print(line, buffer, capacity); });
}

// A print leaves out what is so by default; a line may say it.
tessera_problem defaults_said(tessera_problem p) {
  tessera_cache& c = p.cache;
  if (!c.slots) c.slots = p.len_k;
  if (!c.rows) c.rows = p.batch;
  if (!c.rotary_positions) c.rotary_positions = std::max(p.len_q, p.len_k);
  for (double* number : {&p.softcap, &p.dropout}) *number += 0.0;  // of -0
  return p;
}

void expect_same(const tessera_line* a, const tessera_line* b, const std::string& text) {
  const tessera_problem problem_a = defaults_said(*tessera_line_problem(a));
  const tessera_problem problem_b = defaults_said(*tessera_line_problem(b));
  need(std::memcmp(&problem_a, &problem_b, sizeof problem_a) == 0, "parsed again it is another problem: {}", text);
  need(tessera_line_seed(a) == tessera_line_seed(b) && tessera_line_offset(a) == tessera_line_offset(b),
       "parsed again it has another seed or offset: {}", text);
  for (int name = 0; name < TESSERA_NAMES; ++name) {
    int64_t count_a = 0, count_b = 0;
    const int32_t* const values_a = tessera_line_values(a, name, &count_a);
    const int32_t* const values_b = tessera_line_values(b, name, &count_b);
    need(count_a == count_b && std::equal(values_a, values_a + count_a, values_b),
         "parsed again it has other values of {}: {}", tessera_name_text(name), text);
  }
}

void plan(const tessera_problem& problem, const char* device_name) {
  tessera_device device = {};
  device.size = sizeof device;
  tessera_error error = fresh_error();
  need(tessera_device_find(device_name, &device, &error) == TESSERA_OK, "device: {}", error.message);
  tessera_hints hints;
  tessera_hints_init(&hints);
  tessera_plan* made = nullptr;
  const int32_t code = tessera_plan_make(&problem, &device, &hints, &made, &error);
  const Plan owned(made);
  need(code == TESSERA_OK || code == TESSERA_UNSUPPORTED, "plan on {} gave {}: {}", device_name, code, error.message);
  need(!error.message[0] == (code == TESSERA_OK), "plan on {} gave {} and says \"{}\"", device_name, code,
       error.message);
  if (code != TESSERA_OK) return;
  tessera_plan_facts facts = {};
  facts.size = sizeof facts;
  need(tessera_plan_get(made, &facts, &error) == TESSERA_OK, "facts: {}", error.message);
  need(facts.workspace_bytes >= 0 && facts.bytes_read >= 0 && facts.bytes_written >= 0 &&
           facts.score_bytes_avoided >= 0 && facts.flops >= 0 && facts.roofline_seconds >= 0,
       "a fact of the plan is negative");
  for (int32_t n = 0; n <= facts.steps; ++n)
    need((tessera_plan_step(made, n) != nullptr) == (n < facts.steps), "step {} of {}", n, facts.steps);
  const char* reason = nullptr;
  for (int32_t n = 0; n <= facts.reasons; ++n)
    need((tessera_plan_reason(made, n, &reason) != nullptr) == (n < facts.reasons), "reason {} of {}", n,
         facts.reasons);
  printed([&](char* buffer, size_t capacity) { return tessera_plan_print(made, buffer, capacity); });
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  if (text.find("[@") != std::string::npos) return 0;  // names a file
  std::string why;
  const Line line = parse(text, why);
  if (!line) {
    need(!why.empty(), "refused without a word");
    return 0;
  }
  const std::string once = text_of(line.get());
  const Line again = parse(once, why);
  need(again != nullptr, "its print is refused: {}: {}", once, why);
  const std::string twice = text_of(again.get());
  need(once == twice, "prints\n  {}\n  {}", once, twice);
  expect_same(line.get(), again.get(), once);

  const tessera_problem& problem = *tessera_line_problem(line.get());
  tessera_error error = fresh_error();
  need(tessera_check(&problem, &error) == TESSERA_OK, "parsed, but check says: {}", error.message);
  printed([&](char* buffer, size_t capacity) { return tessera_problem_print(&problem, buffer, capacity); });
  for (const char* device : {"host", "h200"}) plan(problem, device);
  return 0;
}

}  // namespace tessera::fuzz
