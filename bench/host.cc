// Host time of a call: parse, plan, run at a shape too small for the kernel to matter.
#include <benchmark/benchmark.h>

#include <cstdlib>
#include <tessera/tessera.hpp>
#include <vector>

namespace {

constexpr const char* typical = "forward bf16 b4 h32/8 q4096 k4096 d128 mask=causal";

void parse(benchmark::State& state) {
  for (auto _ : state) benchmark::DoNotOptimize(tessera::Line(typical));
}
void plan(benchmark::State& state) {
  const tessera::Problem problem = tessera::Line(typical).problem();
  const tessera::Device host = tessera::Device::host();
  for (auto _ : state) {
    tessera::Plan plan;
    tessera::Plan::make(problem, host, plan).or_throw();
    benchmark::DoNotOptimize(plan.c());
  }
}
void run(benchmark::State& state) {
  constexpr int64_t dim = 16;
  const tessera::Problem problem = tessera::Line("forward f32 b1 h1 q1 k1 d16").problem();
  tessera::Plan plan;
  tessera::Plan::make(problem, tessera::Device::host(), tessera::Hints().threads(1), plan).or_throw();
  std::vector<float> row(dim, 1.0f), out(dim), lse(1);
  const int64_t bytes = plan.facts().workspace_bytes;
  void* const memory = std::aligned_alloc(64, static_cast<size_t>(bytes));
  const auto bound = tessera::Bindings()
                         .q(row.data())
                         .k(row.data())
                         .v(row.data())
                         .out(out.data())
                         .lse(lse.data())
                         .workspace(memory, bytes);
  for (auto _ : state) plan.run(bound).or_throw();
  std::free(memory);
}
BENCHMARK(parse);
BENCHMARK(plan);
BENCHMARK(run);

}  // namespace
