// A toy server: requests arrive, are prefilled, decode a token a step side by side, share a prompt, and leave. One
// paged cache serves all; one plan serves every step, whatever the lengths are.
//
// The model is a single attention layer whose "logits" are its output: token t has q = k = the t-th row of a small
// table and v = (t, 0, 0, ...), so the first number of `out` is a weighted mean of the tokens seen so far. The next
// token is that number, rounded. Every output is compared with the same sum made the long way.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <tessera/tessera.hpp>
#include <vector>

namespace {

constexpr int64_t heads = 4, heads_kv = 2, dim = 16, vocabulary = 32;
constexpr int64_t page_size = 8, pages = 24, most_tokens = 64, columns = most_tokens / page_size;
constexpr int64_t token_floats = heads_kv * dim;

float embed(int64_t token, int64_t d) {
  return static_cast<float>(std::cos(0.7 * static_cast<double>(token + 1) * static_cast<double>(d + 1)));
}

// Pages of the cache: who has how many, and which are free.
class Pages {
 public:
  Pages() : users_(pages, 0) {
    for (int32_t id = pages; id-- > 0;) free_.push_back(id);
  }
  int32_t take() {
    if (free_.empty()) throw std::runtime_error("the cache is full; a real server would wait or evict");
    const int32_t id = free_.back();
    free_.pop_back();
    users_[static_cast<size_t>(id)] = 1;
    return id;
  }
  void share(int32_t id) { ++users_[static_cast<size_t>(id)]; }
  void give_back(int32_t id) {
    if (--users_[static_cast<size_t>(id)] == 0) free_.push_back(id);
  }
  size_t free() const { return free_.size(); }

 private:
  std::vector<int> users_;
  std::vector<int32_t> free_;
};

struct Request {
  int id;
  std::vector<int64_t> tokens;  // prompt and answer
  int64_t cached = 0;           // of them, in the cache
  int64_t until;                // length at which it leaves
  std::vector<int32_t> table;   // its pages
};

struct Cache {  // the pools: (pages, page_size, heads_kv, dim)
  std::vector<float> k = std::vector<float>(pages * page_size * token_floats), v = k;
};

// Appends new tokens of up to `batch` requests, `fresh` each, and attends them: one plan, one run. Lengths are not part
// of the plan.
class Step {
 public:
  Step(int64_t batch, int64_t fresh) : batch_(batch), fresh_(fresh) {
    tessera::Problem p;
    p.batch(batch).heads(heads, heads_kv).lengths(fresh, most_tokens).new_tokens(fresh).dims(dim);
    p.pages(page_size, pages).causal(TESSERA_BOTTOM_RIGHT);
    for (const tessera_name name :
         {TESSERA_CACHE_LENS, TESSERA_PAGE_TABLE, TESSERA_SEQUSED_NEW, TESSERA_SEQUSED_Q, TESSERA_STATUS})
      p.declare(name, TESSERA_I32).or_throw();
    for (const tessera_name name : {TESSERA_Q, TESSERA_K, TESSERA_V, TESSERA_K_NEW, TESSERA_V_NEW, TESSERA_OUT})
      p.declare(name, TESSERA_F32).or_throw();
    tessera::Plan::make(p, tessera::Device::host(), plan_).or_throw();
    const int64_t bytes = plan_.facts().workspace_bytes;
    workspace_.reset(std::aligned_alloc(64, static_cast<size_t>((bytes + 63) / 64 * 64)));
    q_.resize(static_cast<size_t>(batch * fresh * heads * dim));
    out_.resize(q_.size());
    k_new_.resize(static_cast<size_t>(batch * fresh * token_floats));
    v_new_.resize(k_new_.size());
  }
  std::string text() const { return plan_.text(); }

  // Attends the tokens that are not cached yet; returns the first number of each request's last row.
  std::vector<float> run(Cache& cache, const std::vector<Request*>& requests) {
    std::vector<int32_t> lens(static_cast<size_t>(batch_), 0), fresh(lens),
        table(static_cast<size_t>(batch_ * columns), -1);  // idle places of the batch: no keys, no tokens
    for (size_t b = 0; b < requests.size(); ++b) {
      const Request& r = *requests[b];
      lens[b] = static_cast<int32_t>(r.cached);
      fresh[b] = static_cast<int32_t>(static_cast<int64_t>(r.tokens.size()) - r.cached);
      std::copy(r.table.begin(), r.table.end(), table.begin() + static_cast<int64_t>(b) * columns);
      for (int64_t n = 0; n < fresh[b]; ++n) write_token(static_cast<int64_t>(b) * fresh_ + n, r, r.cached + n);
    }
    int32_t status = 0;
    plan_
        .run(tessera::Bindings()
                 .q(q_.data())
                 .k(cache.k.data())
                 .v(cache.v.data())
                 .k_new(k_new_.data())
                 .v_new(v_new_.data())
                 .cache_lens(lens.data())
                 .seqused(fresh.data(), nullptr)
                 .seqused_new(fresh.data())
                 .page_table(table.data())
                 .status(&status)
                 .out(out_.data())
                 .workspace(workspace_.get(), plan_.facts().workspace_bytes))
        .or_throw();
    std::vector<float> last;
    for (size_t b = 0; b < requests.size(); ++b)
      last.push_back(out_[static_cast<size_t>(((static_cast<int64_t>(b) * fresh_ + fresh[b] - 1) * heads) * dim)]);
    return last;
  }

 private:
  void write_token(int64_t row, const Request& r, int64_t at) {
    const int64_t token = r.tokens[static_cast<size_t>(at)];
    for (int64_t d = 0; d < dim; ++d) {
      for (int64_t h = 0; h < heads; ++h) q_[static_cast<size_t>((row * heads + h) * dim + d)] = embed(token, d);
      for (int64_t h = 0; h < heads_kv; ++h) {
        const auto to = static_cast<size_t>(row * token_floats + h * dim + d);
        k_new_[to] = embed(token, d);
        v_new_[to] = d == 0 ? static_cast<float>(token) : 0;
      }
    }
  }

  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  int64_t batch_, fresh_;
  std::vector<float> q_, k_new_, v_new_, out_;
  std::unique_ptr<void, Free> workspace_;
  tessera::Plan plan_;
};

// The same number the long way.
double by_hand(const std::vector<int64_t>& tokens) {
  double total = 0, sum = 0;
  for (const int64_t token : tokens) {
    double z = 0;
    for (int64_t d = 0; d < dim; ++d)
      z += static_cast<double>(embed(tokens.back(), d)) * static_cast<double>(embed(token, d));
    const double weight = std::exp(z / std::sqrt(static_cast<double>(dim)));
    total += weight;
    sum += weight * static_cast<double>(token);
  }
  return sum / total;
}

// Pages for all tokens of a request.
void allocate(Pages& free, Request& r) {
  while (static_cast<int64_t>(r.table.size()) * page_size < static_cast<int64_t>(r.tokens.size()))
    r.table.push_back(free.take());
}

}  // namespace

int main() try {
  constexpr int64_t places = 3, longest_prompt = 20;
  const std::vector<int64_t> prompt = {3, 14, 15, 9, 26, 5, 3, 5, 8, 9, 7, 9, 3, 23, 8, 4, 6};
  Cache cache;
  Pages free;
  Step prefill(1, longest_prompt), decode(places, 1);
  std::printf("%s", decode.text().c_str());

  std::vector<Request> waiting, running;
  for (int id = 5; id-- > 0;) {
    waiting.push_back({id, prompt, 0, static_cast<int64_t>(prompt.size()) + 4 + 3 * id, {}});
    waiting.back().tokens.push_back(id);  // what this user asks
  }
  std::vector<int32_t> prompt_pages;  // whole pages of the prompt, which all requests share once the first is in

  bool right = true;
  const auto take = [&](Request& r, float number) {
    r.cached = static_cast<int64_t>(r.tokens.size());
    right &= std::abs(static_cast<double>(number) - by_hand(r.tokens)) < 1e-4;
    r.tokens.push_back(std::lround(number) % vocabulary);
  };
  while (!waiting.empty() || !running.empty()) {
    if (!waiting.empty() && running.size() < places) {
      Request r = waiting.back();
      waiting.pop_back();
      for (const int32_t id : prompt_pages) {
        free.share(id);
        r.table.push_back(id);
        r.cached += page_size;
      }
      allocate(free, r);
      std::printf("request %d: %d of its %zu tokens are cached\n", r.id, static_cast<int>(r.cached), r.tokens.size());
      take(r, prefill.run(cache, {&r})[0]);
      if (prompt_pages.empty()) {
        prompt_pages.assign(r.table.begin(), r.table.begin() + static_cast<int64_t>(prompt.size()) / page_size);
        for (const int32_t id : prompt_pages) free.share(id);
      }
      running.push_back(r);
    }
    std::vector<Request*> batch;
    for (Request& r : running) {
      allocate(free, r);
      batch.push_back(&r);
    }
    const std::vector<float> numbers = decode.run(cache, batch);
    for (size_t b = 0; b < batch.size(); ++b) take(*batch[b], numbers[b]);
    for (size_t n = running.size(); n-- > 0;) {
      Request& r = running[n];
      if (static_cast<int64_t>(r.tokens.size()) < r.until) continue;
      std::printf("request %d:", r.id);
      for (size_t t = prompt.size() + 1; t < r.tokens.size(); ++t) std::printf(" %d", static_cast<int>(r.tokens[t]));
      std::printf("\n");
      for (const int32_t id : r.table) free.give_back(id);
      running.erase(running.begin() + static_cast<int64_t>(n));
    }
  }
  for (const int32_t id : prompt_pages) free.give_back(id);
  right &= free.free() == static_cast<size_t>(pages);
  std::printf("%s\n", right ? "every number is as made by hand, every page is free again" : "WRONG");
  return right ? 0 : TESSERA_WRONG;
} catch (const std::exception& e) {
  std::fprintf(stderr, "%s\n", e.what());
  return TESSERA_FAILED;
}
