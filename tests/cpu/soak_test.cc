// A toy server: requests come, share prefixes, append, attend and go, for 100,000 steps on one paged cache. Beside it a
// dense copy of each request's keys, attended in float64. Every byte of the pools is accounted for after every step:
// canaries stand between the pages.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <tessera/tessera.hpp>

#include "tests/random_line.h"

namespace tessera::test {
namespace {

#ifdef TESSERA_SANITIZED
constexpr int steps = 100'000 / 20;
#else
constexpr int steps = 100'000;
#endif

constexpr int64_t heads = 4, heads_kv = 2, dim = 8, page = 4, pages = 48, most_keys = 40, columns = most_keys / page;
constexpr int64_t token = heads_kv * dim, canary = 5, page_stride = page * token + canary;

struct Request {
  std::vector<int32_t> table;
  std::vector<float> k, v;  // dense, a token after the other
  int64_t keys() const { return static_cast<int64_t>(k.size()) / token; }
};

struct Shape {
  int64_t batch, queries, fresh;
  bool attends;
  auto operator<=>(const Shape&) const = default;
};

class Server {
 public:
  explicit Server(uint64_t seed) : draw_(seed), k_(pages * page_stride, 1e30f), v_(k_), uses_(pages, 0) {
    for (int32_t id = 0; id < pages; ++id) free_.push_back(id);
    expected_k_ = k_;
    expected_v_ = v_;
  }

  void step() {
    const int64_t what = draw_.below(8);
    if (requests_.empty() || (what == 0 && requests_.size() < 9)) arrive();
    else if (what == 1) leave(draw_.below(static_cast<int64_t>(requests_.size())));
    else work(what);
    ASSERT_EQ(std::memcmp(k_.data(), expected_k_.data(), k_.size() * 4), 0) << "k was written where no token went";
    ASSERT_EQ(std::memcmp(v_.data(), expected_v_.data(), v_.size() * 4), 0) << "v was written where no token went";
  }
  void close() {
    while (!requests_.empty()) leave(0);
    EXPECT_EQ(free_.size(), static_cast<size_t>(pages)) << "pages were lost";
    for (const int use : uses_) EXPECT_EQ(use, 0);
  }
  int64_t attended() const { return attended_; }
  int64_t shared() const { return shared_; }

 private:
  float number() { return static_cast<float>(draw_.below(2001) - 1000) / 500; }
  int32_t take_page() {
    const int32_t id = free_.back();
    free_.pop_back();
    uses_[static_cast<size_t>(id)] = 1;
    return id;
  }
  void drop(int32_t id) {
    if (--uses_[static_cast<size_t>(id)] == 0) free_.push_back(id);
  }

  // A new request, half of the time with the prefix of another: whole pages are shared, the rest is copied.
  void arrive() {
    Request r;
    if (!requests_.empty() && draw_.one_in(2) && !free_.empty()) {
      const Request& other = requests_[static_cast<size_t>(draw_.below(static_cast<int64_t>(requests_.size())))];
      const int64_t keys = draw_.below(other.keys() + 1), whole = keys / page;
      r.k.assign(other.k.begin(), other.k.begin() + keys * token);
      r.v.assign(other.v.begin(), other.v.begin() + keys * token);
      for (int64_t n = 0; n < whole; ++n) {
        r.table.push_back(other.table[static_cast<size_t>(n)]);
        ++uses_[static_cast<size_t>(r.table.back())];
        ++shared_;
      }
      if (keys % page) {
        r.table.push_back(take_page());
        for (std::vector<float>* pool : {&k_, &v_, &expected_k_, &expected_v_})
          std::copy_n(pool->begin() + other.table[static_cast<size_t>(whole)] * page_stride, keys % page * token,
                      pool->begin() + r.table.back() * page_stride);
      }
    }
    requests_.push_back(std::move(r));
  }
  void leave(int64_t at) {
    for (const int32_t id : requests_[static_cast<size_t>(at)].table) drop(id);
    requests_.erase(requests_.begin() + at);
  }

  // Some requests append, attend, or both.
  void work(int64_t what) {
    const bool appends = what != 2, attends = what != 3;
    Shape shape = {1 + draw_.below(std::min<int64_t>(4, static_cast<int64_t>(requests_.size()))), 0,
                   appends ? 1 + draw_.below(5) : 0, attends};
    if (attends) shape.queries = appends && draw_.one_in(2) ? shape.fresh : 1 + draw_.below(3);
    std::vector<Request*> batch;
    for (int64_t n = 0; n < shape.batch; ++n) batch.push_back(&requests_[static_cast<size_t>(n)]);
    std::rotate(requests_.begin(), requests_.begin() + 1, requests_.end());  // others come first the next time

    std::vector<int32_t> lens, fresh;
    for (Request* r : batch) {
      lens.push_back(static_cast<int32_t>(r->keys()));
      int64_t n = draw_.one_in(3) ? draw_.below(shape.fresh + 1) : shape.fresh;
      n = std::min(n, most_keys - r->keys());
      while ((r->keys() + n + page - 1) / page > static_cast<int64_t>(r->table.size() + free_.size())) --n;
      while (static_cast<int64_t>(r->table.size()) * page < r->keys() + n) r->table.push_back(take_page());
      fresh.push_back(static_cast<int32_t>(n));
    }
    run(shape, batch, lens, fresh);
  }

  void run(const Shape& shape, const std::vector<Request*>& batch, const std::vector<int32_t>& lens,
           const std::vector<int32_t>& fresh) {
    std::vector<float> q(static_cast<size_t>(shape.batch * shape.queries * heads * dim)), out(q.size());
    std::vector<float> k_new(static_cast<size_t>(shape.batch * shape.fresh * token)), v_new(k_new.size());
    for (std::vector<float>* t : {&q, &k_new, &v_new})
      for (float& x : *t) x = number();
    std::vector<int32_t> table(static_cast<size_t>(shape.batch * columns), -1);
    for (size_t b = 0; b < batch.size(); ++b) {
      std::copy(batch[b]->table.begin(), batch[b]->table.end(), table.begin() + static_cast<int64_t>(b) * columns);
      for (int64_t n = 0; n < fresh[b]; ++n) {
        const auto from = (static_cast<int64_t>(b) * shape.fresh + n) * token;
        const int64_t slot = batch[b]->keys();
        const auto to = batch[b]->table[static_cast<size_t>(slot / page)] * page_stride + slot % page * token;
        std::copy_n(k_new.begin() + from, token, expected_k_.begin() + to);
        std::copy_n(v_new.begin() + from, token, expected_v_.begin() + to);
        batch[b]->k.insert(batch[b]->k.end(), k_new.begin() + from, k_new.begin() + from + token);
        batch[b]->v.insert(batch[b]->v.end(), v_new.begin() + from, v_new.begin() + from + token);
      }
    }
    int32_t status = 0;
    Bindings bound;
    bound.q(q.data()).k(k_.data()).v(v_.data()).out(out.data()).cache_lens(lens.data()).page_table(table.data());
    bound.k_new(k_new.data()).v_new(v_new.data()).seqused_new(fresh.data()).status(&status);
    const Plan& plan = plan_for(shape);
    workspace_.resize(static_cast<size_t>(plan.facts().workspace_bytes / 64 + 1));
    plan.run(bound.workspace(workspace_.data(), plan.facts().workspace_bytes)).or_throw();
    ASSERT_EQ(status, 0);
    for (size_t b = 0; b < batch.size() && shape.attends; ++b)
      for (int64_t i = 0; i < shape.queries; ++i)
        for (int64_t h = 0; h < heads; ++h) {
          const int64_t row = ((static_cast<int64_t>(b) * shape.queries + i) * heads + h) * dim;
          expect_attended(*batch[b], shape.queries - 1 - i, h, &q[static_cast<size_t>(row)],
                          &out[static_cast<size_t>(row)]);
        }
  }

  // Causal, aligned to the last key: `behind` keys are too new for the row.
  void expect_attended(const Request& r, int64_t behind, int64_t h, const float* q, const float* out) {
    const int64_t keys = std::max<int64_t>(0, r.keys() - behind), kv = h / (heads / heads_kv);
    std::vector<double> weights;
    double total = 0, expected[dim] = {};
    for (int64_t j = 0; j < keys; ++j) {
      double z = 0;
      for (int64_t d = 0; d < dim; ++d)
        z += static_cast<double>(q[d]) * static_cast<double>(r.k[static_cast<size_t>(j * token + kv * dim + d)]);
      weights.push_back(std::exp(z / std::sqrt(static_cast<double>(dim))));
      total += weights.back();
    }
    for (int64_t j = 0; j < keys; ++j)
      for (int64_t d = 0; d < dim; ++d)
        expected[d] += weights[static_cast<size_t>(j)] / total *
                       static_cast<double>(r.v[static_cast<size_t>(j * token + kv * dim + d)]);
    for (int64_t d = 0; d < dim; ++d) ASSERT_NEAR(static_cast<double>(out[d]), expected[d], 1e-5);
    ++attended_;
  }

  const Plan& plan_for(const Shape& shape) {
    Plan& plan = plans_[shape];
    if (plan) return plan;
    Problem p;
    p.batch(shape.batch).lengths(shape.queries, most_keys).dims(dim).pages(page, pages).new_tokens(shape.fresh);
    if (shape.attends) p.heads(heads, heads_kv).causal(TESSERA_BOTTOM_RIGHT);
    else p.heads(heads_kv).append_alone();
    for (const tessera_name name : {TESSERA_CACHE_LENS, TESSERA_PAGE_TABLE, TESSERA_STATUS})
      p.declare(name, TESSERA_I32).or_throw();
    if (shape.fresh) {
      for (const tessera_name name : {TESSERA_K_NEW, TESSERA_V_NEW}) p.declare(name, TESSERA_F32).or_throw();
      p.declare(TESSERA_SEQUSED_NEW, TESSERA_I32).or_throw();
    }
    for (const tessera_name name : {TESSERA_K, TESSERA_V}) {
      p.declare(name, TESSERA_F32).or_throw();
      p.operand(name).stride[0] = page_stride;
    }
    if (shape.attends)
      for (const tessera_name name : {TESSERA_Q, TESSERA_OUT}) p.declare(name, TESSERA_F32).or_throw();
    Plan::make(p, Device::host(), Hints().threads(1 + static_cast<int>(plans_.size() % 2)), plan).or_throw();
    return plan;
  }

  struct alignas(64) Line {
    std::byte bytes[64];
  };
  Draw draw_;
  std::vector<float> k_, v_, expected_k_, expected_v_;
  std::vector<int> uses_;  // requests on each page
  std::vector<int32_t> free_;
  std::vector<Request> requests_;
  std::map<Shape, Plan> plans_;
  std::vector<Line> workspace_;
  int64_t attended_ = 0, shared_ = 0;
};

TEST(Soak, PagedCache) {
  Server server(11);
  for (int n = 0; n < steps; ++n) {
    server.step();
    if (HasFatalFailure()) FAIL() << "at step " << n;
  }
  server.close();
  EXPECT_GT(server.attended(), steps);
  EXPECT_GT(server.shared(), steps / 50);
}

}  // namespace
}  // namespace tessera::test
