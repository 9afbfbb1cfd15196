// Calls of the C interface as tests make them: what must go right, what must be refused in words.
#pragma once
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "tessera/tessera.h"

namespace tessera::test {

inline tessera_error fresh_error() {
  tessera_error error = {};
  error.size = sizeof error;
  return error;
}

// A call that must fail with `code` and say `fragment`.
template <class Call>
void expect_says(int code, const std::string& fragment, Call&& call) {
  tessera_error error = fresh_error();
  EXPECT_EQ(call(&error), code) << fragment;
  EXPECT_EQ(error.code, code) << fragment;
  EXPECT_NE(std::string(error.message).find(fragment), std::string::npos)
      << "wanted: " << fragment << "\nmessage: " << error.message;
  EXPECT_EQ(call(nullptr), code) << "without an error struct: " << fragment;
}
template <class Call>
void expect_ok(Call&& call) {
  tessera_error error = fresh_error();
  EXPECT_EQ(call(&error), TESSERA_OK) << error.message;
}

struct Free {
  void operator()(tessera_line* line) const { tessera_line_free(line); }
  void operator()(tessera_plan* plan) const { tessera_plan_free(plan); }
};
using Line = std::unique_ptr<tessera_line, Free>;
using Plan = std::unique_ptr<tessera_plan, Free>;

inline Line parse(const char* text) {
  tessera_line* line = nullptr;
  expect_ok([&](tessera_error* e) { return tessera_line_parse(text, &line, e); });
  return Line(line);
}
inline tessera_device find_device(const char* name) {
  tessera_device device = {};
  device.size = sizeof device;
  expect_ok([&](tessera_error* e) { return tessera_device_find(name, &device, e); });
  return device;
}
inline Plan make(const char* text, const tessera_hints* hints = nullptr) {
  const Line line = parse(text);
  const tessera_device device = find_device("host");
  tessera_plan* plan = nullptr;
  expect_ok(
      [&](tessera_error* e) { return tessera_plan_make(tessera_line_problem(line.get()), &device, hints, &plan, e); });
  return Plan(plan);
}
inline tessera_hints allowing(const char* kernels) {
  tessera_hints hints;
  tessera_hints_init(&hints);
  hints.kernels = kernels;
  return hints;
}
inline tessera_bindings bindings_of(const tessera_line* line) {
  tessera_bindings b;
  tessera_bindings_init(&b);
  for (int32_t name = 0; name < TESSERA_NAMES; ++name) {
    int64_t count = 0;
    b.data[name] = const_cast<int32_t*>(tessera_line_values(line, name, &count));
  }
  return b;
}

}  // namespace tessera::test
