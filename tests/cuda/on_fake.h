// Runs through the fake driver (fake_libcuda.cc), each test in a process of its own.
#pragma once
#include <string>
#include <vector>

#include "child.h"
#include "core/operand.h"
#include "fake_libcuda.h"
#include "made_pack.h"
#include "tests/api/calls.h"

namespace tessera::test {

// A child with a made pack, an empty cache and `environment` for the fake.
template <class Test>
void with_driver(Environment environment, Test&& test) {
  const Folder cache;
  environment.emplace_back("TESSERA_CACHE", cache.path());
  in_child(environment, [&] {
    put_pack(made_pack());
    test();
  });
}
template <class Test>
void with_driver(Test&& test) {
  with_driver({}, test);
}

inline std::byte* allocate(size_t bytes, int device = 0) {
  cuda::Context before = nullptr, context = nullptr;
  unsigned long long address = 0;
  EXPECT_EQ(cuCtxGetCurrent(&before), 0);
  EXPECT_EQ(cuDevicePrimaryCtxRetain(&context, device), 0);
  EXPECT_EQ(cuCtxSetCurrent(context), 0);
  EXPECT_EQ(cuMemAlloc_v2(&address, bytes), 0);
  EXPECT_EQ(cuCtxSetCurrent(before), 0);
  return reinterpret_cast<std::byte*>(address);  // lives as long as the child
}

// A line, a plan of it, its operands and workspace in the memory of a device.
struct Case {
  Line line;
  Plan plan;
  tessera_bindings bindings;

  explicit Case(const char* text, const char* device_name = "cuda", int device = 0,
                const tessera_hints* hints = nullptr)
      : line(parse(text)) {
    const tessera_device facts = find_device(device_name);
    tessera_plan* made = nullptr;
    expect_ok([&](tessera_error* e) { return tessera_plan_make(&problem(), &facts, hints, &made, e); });
    plan.reset(made);
    tessera_bindings_init(&bindings);
    for (int name = 0; name < TESSERA_NAMES; ++name) {
      const tessera_operand& o = problem().operand[name];
      const auto bytes = static_cast<size_t>(core::span(o) * core::dtype_bytes(o.dtype));
      if (bytes > 0) bindings.data[name] = allocate(bytes, device);
    }
    tessera_plan_facts got = {};
    got.size = sizeof got;
    expect_ok([&](tessera_error* e) { return tessera_plan_get(made, &got, e); });
    bindings.workspace_bytes = got.workspace_bytes;
    if (got.workspace_bytes > 0) bindings.workspace = allocate(static_cast<size_t>(got.workspace_bytes), device);
  }
  const tessera_problem& problem() const { return *tessera_line_problem(line.get()); }
  int32_t run(tessera_error* error, void* stream = nullptr) const {
    return tessera_run(plan.get(), &bindings, stream, error);
  }
  // Runs it and returns what was launched.
  std::vector<FakeLaunch> launches(void* stream = nullptr) const {
    const int before = fake_launches();
    expect_ok([&](tessera_error* e) { return run(e, stream); });
    std::vector<FakeLaunch> all(static_cast<size_t>(fake_launches() - before));
    for (size_t n = 0; n < all.size(); ++n) fake_launch(before + static_cast<int>(n), &all[n]);
    return all;
  }
  FakeLaunch launch(void* stream = nullptr) const {
    const std::vector<FakeLaunch> all = launches(stream);
    EXPECT_EQ(all.size(), 1u);
    return all.empty() ? FakeLaunch{} : all.front();
  }
  rules::ForwardParams params() const { return launch().params; }
  void expect_refused(int code, const std::string& fragment) const {
    const int before = fake_launches();
    expect_says(code, fragment, [&](tessera_error* e) { return run(e); });
    EXPECT_EQ(fake_launches(), before) << fragment;
  }
};

}  // namespace tessera::test
