#include "reference/attention.h"

namespace tessera::reference {

std::vector<Pair> sampled_pairs(int64_t batch, int64_t heads_kv, int64_t n) {
  const int64_t total = batch * heads_kv;
  const int64_t count = n == 0 ? total : std::min(n, total);
  std::vector<Pair> pairs;
  for (int64_t t = 0; t < count; ++t) {
    const auto at = static_cast<int64_t>(count == 1 ? 0 : Wide{t} * (total - 1) / (count - 1));
    pairs.push_back({at / heads_kv, at % heads_kv});
  }
  return pairs;
}

void oracle(const Problem& p, const Bindings& bound, const Task& task) {
  const auto exact = [](double x) { return x; };
  Attention<double, decltype(exact)>(p, bound, task, exact).run();
}

}  // namespace tessera::reference
