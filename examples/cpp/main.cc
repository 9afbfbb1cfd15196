// Causal attention with grouped heads on the CPU, forward and backward, from C++.
//
// All queries are 0, so row i weighs its keys 0..i alike. With v_j = j, k_j = (j, 0, 0, ...) and dout = 1:
//   out_i = i / 2        dv_j = group * sum_{i >= j} 1 / (i + 1)        dk = 0
//   dq_i  = scale * dim * (variance of 0..i), in its first element: scale * dim * i (i + 2) / 12
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <tessera/tessera.hpp>
#include <vector>

namespace {

constexpr int64_t heads = 6, heads_kv = 2, group = heads / heads_kv, length = 96, dim = 32;
using Tensor = std::vector<float>;

tessera::Problem causal() {
  return tessera::Problem()
      .batch(1)
      .heads(heads, heads_kv)
      .lengths(length, length)
      .dims(dim)
      .causal(TESSERA_BOTTOM_RIGHT);
}

// Plans, prints the plan, and runs it in a workspace of its own.
void attend(tessera::Problem problem, tessera::Bindings bindings) {
  problem.declare_all(TESSERA_F32).or_throw();
  tessera::Plan plan;
  tessera::Plan::make(problem, tessera::Device::host(), plan).or_throw();
  std::printf("%s", plan.text().c_str());

  const int64_t bytes = plan.facts().workspace_bytes;
  const std::unique_ptr<void, decltype(&std::free)> workspace(std::aligned_alloc(64, static_cast<size_t>(bytes)),
                                                              std::free);
  plan.run(bindings.workspace(workspace.get(), bytes)).or_throw();
}

bool near(const char* what, double got, double expected) {
  std::printf("%-10s %.6f, in closed form %.6f\n", what, got, expected);
  return std::abs(got - expected) <= 1e-5 * std::abs(expected) + 1e-6;
}

double sum(const Tensor& t) {
  double total = 0;
  for (const float x : t) total += x;
  return total;
}

}  // namespace

int main() try {
  Tensor q(length * heads * dim), k(length * heads_kv * dim), v(k.size()), out(q.size()), lse(heads * length);
  Tensor dout(out.size(), 1), dq(q.size()), dk(k.size()), dv(v.size());
  for (int64_t j = 0; j < length; ++j)
    for (int64_t row = j * heads_kv; row < (j + 1) * heads_kv; ++row) {
      k[static_cast<size_t>(row * dim)] = static_cast<float>(j);
      for (int64_t d = 0; d < dim; ++d) v[static_cast<size_t>(row * dim + d)] = static_cast<float>(j);
    }

  tessera::Bindings bindings;
  bindings.q(q.data()).k(k.data()).v(v.data()).out(out.data()).lse(lse.data());
  attend(causal(), bindings);
  attend(causal().backward(), bindings.dout(dout.data()).dq(dq.data()).dk(dk.data()).dv(dv.data()));

  double out_sum = 0, dq_sum = 0;
  for (int64_t i = 0; i < length; ++i) {
    const double x = static_cast<double>(i);
    out_sum += static_cast<double>(heads * dim) * x / 2;
    dq_sum += static_cast<double>(heads * dim) / std::sqrt(static_cast<double>(dim)) * x * (x + 2) / 12;
  }
  bool right = near("sum of out", sum(out), out_sum);
  right &= near("sum of dq", sum(dq), dq_sum);
  right &= near("sum of dk", sum(dk), 0);
  right &= near("sum of dv", sum(dv), static_cast<double>(heads * length * dim));  // every row's weights add up to 1
  right &= near("last dv", dv.back(), static_cast<double>(group) / static_cast<double>(length));
  return right ? 0 : TESSERA_WRONG;
} catch (const std::exception& e) {
  std::fprintf(stderr, "%s\n", e.what());
  return TESSERA_FAILED;
}
