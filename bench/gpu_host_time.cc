// What a planned run costs the host beside an empty launch, and what a plan costs. Needs a GPU; prints microseconds.
#include <dlfcn.h>
#include <tessera/tessera.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace {

double now_us() {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void need(bool holds, const char* what) {
  if (!holds) std::fprintf(stderr, "gpu_host_time: %s\n", what), std::exit(2);
}

struct Cuda {
  void* library = ::dlopen("libcuda.so.1", RTLD_NOW);
  template <class F>
  F* find(const char* name) {
    return reinterpret_cast<F*>(::dlsym(library, name));
  }
};

constexpr const char* empty_kernel =
    ".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry nothing() { ret; }\n";

struct Times {
  std::vector<double> all;
  double at(double share) {
    std::sort(all.begin(), all.end());
    return all[static_cast<size_t>(share * static_cast<double>(all.size() - 1))];
  }
};

struct Problem {
  tessera_line* line = nullptr;
  explicit Problem(const std::string& text) {
    tessera_error error{};
    error.size = sizeof error;
    need(tessera_line_parse(text.c_str(), &line, &error) == TESSERA_OK, error.message);
  }
  ~Problem() { tessera_line_free(line); }
};

}  // namespace

int main() {
  Cuda cuda;
  need(cuda.library != nullptr, "no libcuda.so.1");
  const auto init = cuda.find<int(unsigned)>("cuInit");
  const auto retain = cuda.find<int(void**, int)>("cuDevicePrimaryCtxRetain");
  const auto set = cuda.find<int(void*)>("cuCtxSetCurrent");
  const auto sync = cuda.find<int()>("cuCtxSynchronize");
  const auto allocate = cuda.find<int(unsigned long long*, size_t)>("cuMemAlloc_v2");
  const auto load = cuda.find<int(void**, const void*)>("cuModuleLoadData");
  const auto function = cuda.find<int(void**, void*, const char*)>("cuModuleGetFunction");
  const auto launch = cuda.find<int(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*,
                                    void**, void**)>("cuLaunchKernel");
  void *context = nullptr, *module = nullptr, *nothing = nullptr;
  need(init(0) == 0 && retain(&context, 0) == 0 && set(context) == 0, "no device");
  need(load(&module, empty_kernel) == 0 && function(&nothing, module, "nothing") == 0,
       "the empty kernel does not load");

  tessera_error error{};
  error.size = sizeof error;
  tessera_device device{};
  device.size = sizeof device;
  need(tessera_device_find("cuda", &device, &error) == TESSERA_OK, error.message);

  const Problem problem("forward bf16 b1 h2 q128 k128 d128 mask=causal");
  const tessera_problem* const p = tessera_line_problem(problem.line);
  const auto plan_once = [&](const tessera_problem* of) {
    tessera_plan* plan = nullptr;
    need(tessera_plan_make(of, &device, nullptr, &plan, &error) == TESSERA_OK, error.message);
    return plan;
  };
  Times cold, warm;
  {
    std::vector<Problem> others;
    others.reserve(400);
    for (int n = 0; n < 400; ++n)
      others.emplace_back("forward bf16 b" + std::to_string(1 + n % 7) + " h8/2 q" + std::to_string(512 + n) + " k" +
                          std::to_string(1024 + n) + " d128 mask=causal");
    for (const Problem& other : others) {
      const double start = now_us();
      tessera_plan* const plan = plan_once(tessera_line_problem(other.line));
      cold.all.push_back(now_us() - start);
      tessera_plan_free(plan);
    }
    others.clear();
  }
  tessera_plan* const plan = plan_once(p);
  for (int round = 0; round < 100; ++round) {
    const double start = now_us();
    for (int n = 0; n < 100; ++n) tessera_plan_free(plan_once(p));
    warm.all.push_back((now_us() - start) / 100);
  }

  tessera_bindings bound;
  tessera_bindings_init(&bound);
  for (const int name : {TESSERA_Q, TESSERA_K, TESSERA_V, TESSERA_OUT, TESSERA_LSE}) {
    unsigned long long memory = 0;
    need(allocate(&memory, 1 << 20) == 0, "no memory");
    bound.data[name] = reinterpret_cast<void*>(memory);
  }
  const auto run = [&] { need(tessera_run(plan, &bound, nullptr, &error) == TESSERA_OK, error.message); };
  double start = now_us();
  run();
  const double first = now_us() - start;
  sync();
  const double first_done = now_us() - start;

  Times empty, ours;
  for (int round = 0; round < 60; ++round) {
    constexpr int each = 200;  // below the depth of the driver's queue
    start = now_us();
    for (int n = 0; n < each; ++n) launch(nothing, 1, 1, 1, 128, 1, 1, 0, nullptr, nullptr, nullptr);
    empty.all.push_back((now_us() - start) / each);
    sync();
    start = now_us();
    for (int n = 0; n < each; ++n) run();
    ours.all.push_back((now_us() - start) / each);
    sync();
  }
  std::printf("| host time, microseconds | median | quarters |\n| --- | --- | --- |\n");
  const auto row = [](const char* what, Times& t) {
    std::printf("| %s | %.2f | %.2f to %.2f |\n", what, t.at(0.5), t.at(0.25), t.at(0.75));
  };
  row("an empty launch", empty);
  row("a planned run", ours);
  std::printf("| the run beyond the launch | %.2f | |\n", ours.at(0.5) - empty.at(0.5));
  row("a plan made before (and freed)", warm);
  row("a plan not made before", cold);
  std::printf("| the first run, which loads the kernel | %.0f | done after %.0f |\n", first, first_done);
  tessera_plan_free(plan);
}
