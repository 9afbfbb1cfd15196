// NVRTC as the library uses it: machine code, PTX, registers, what it complains of. Skipped where there is none.
#include "cuda/compile.h"

#include "cuda/driver.h"
#include "cuda/pack.h"
#include "tests/core/refusal.h"

namespace tessera::cuda {
namespace {

using core::expect_says;
using core::refusal;

class Compile : public testing::Test {
 protected:
  void SetUp() override {
#if defined(TESSERA_SANITIZED)
    GTEST_SKIP() << "what NVRTC does is no business of our sanitizers";
#endif
    const OpenedCompiler opened = open_compiler("", 0);
    if (!opened.compiler) GTEST_SKIP() << opened.why;
    compiler_ = opened.compiler;
  }
  const Compiler* compiler_ = nullptr;
};

Code code_with(const char* body, const char* bounds = "") {
  return {.text = "a test",
          .source = fmt::format("extern \"C\" __global__ void {} f(float* x) {{ {} }}", bounds, body),
          .entry = "f",
          .threads = 32,
          .shared_bytes = 0,
          .least_arch = 75,
          .only_arch = false};
}

TEST_F(Compile, MachineCodeAndPtx) {
  const Image machine = compiler_->compile(code_with("x[0] = x[1];"), {90, false});
  EXPECT_TRUE(
      machine.bytes.starts_with("\x7F"
                                "ELF"));
  EXPECT_EQ(machine.target, (Target{90, false}));
  EXPECT_GT(machine.registers, 0);
  EXPECT_LE(machine.registers, 255);
  EXPECT_EQ(machine.spill_bytes, 0);
  EXPECT_EQ(machine.warnings, "");
  const Image ptx = compiler_->compile(code_with("x[0] = x[1];"), {80, true});
  EXPECT_NE(ptx.bytes.find(".target sm_80"), std::string::npos);
  EXPECT_EQ(ptx.registers, 0);
}

// wgmma is of sm_90a alone.
TEST_F(Compile, CodeOfOneChipHasItsOwnInstructions) {
  Code code = code_with("asm volatile(\"wgmma.fence.sync.aligned;\");");
  expect_says(refusal([&] { compiler_->compile(code, {90, false}); }), TESSERA_FAILED, "does not compile a test for");
  code.least_arch = 90;
  code.only_arch = true;
  const Image image = compiler_->compile(code, {90, false});
  EXPECT_TRUE(
      image.bytes.starts_with("\x7F"
                              "ELF"));
  EXPECT_EQ(image.target, (Target{90, false}));
}

TEST(CompilesFor, WhatHasTheInstructions) {
  Code code = code_with("");
  for (const Target target : {Target{75, false}, Target{80, true}, Target{120, false}})
    EXPECT_TRUE(compiles_for(code, target)) << text(target);
  code.least_arch = 90;
  for (const Target target : {Target{75, false}, Target{80, true}})
    EXPECT_FALSE(compiles_for(code, target)) << text(target);
  EXPECT_TRUE(compiles_for(code, {100, false}));
  code.only_arch = true;
  EXPECT_TRUE(compiles_for(code, {90, false}));
  for (const Target target : {Target{80, false}, Target{90, true}, Target{100, false}})
    EXPECT_FALSE(compiles_for(code, target)) << text(target);
}

TEST_F(Compile, AShippedKernelNeitherSpillsNorWarns) {
  const Code code = code_of(shipped_forward().back());
  const Image image = compiler_->compile(code, {90, false});
  EXPECT_TRUE(
      image.bytes.starts_with("\x7F"
                              "ELF"));
  EXPECT_GT(image.registers, 100);  // its sums alone are 64
  EXPECT_EQ(image.spill_bytes, 0);
  EXPECT_EQ(image.warnings, "");
}

TEST_F(Compile, SpillsAreCounted) {
  // 1024 threads of two blocks leave 32 registers a thread; 64 numbers are wanted at once.
  const Image image = compiler_->compile(
      code_with("float y[64]; for (int i = 0; i < 64; ++i) y[i] = x[i * 32]; __syncthreads();"
                "for (int n = 0; n < 9; ++n) for (int i = 0; i < 64; ++i) y[i] = y[i] * y[(i + 1) % 64] + y[63 - i];"
                "for (int i = 0; i < 64; ++i) x[i] = y[i];",
                "__launch_bounds__(1024, 2)"),
      {90, false});
  EXPECT_GT(image.spill_bytes, 0);
  EXPECT_EQ(image.registers, 32);
}

TEST_F(Compile, WhatDoesNotCompileIsToldWithTheLog) {
  const auto got = refusal([&] { compiler_->compile(code_with("x[0] = nonsense;"), {90, false}); });
  expect_says(got, TESSERA_FAILED, "does not compile a test for sm_90:\n");
  expect_says(got, TESSERA_FAILED, "identifier \"nonsense\" is undefined");
  expect_says(refusal([&] { compiler_->compile(code_with(""), {31, false}); }), TESSERA_FAILED, "for sm_31:\n");
}

TEST_F(Compile, TheKeySaysVersionAndOptions) {
  EXPECT_NE(compiler_->key().find("nvrtc " + version_text(compiler_->version)), std::string::npos);
  EXPECT_NE(compiler_->key().find("--std=c++20"), std::string::npos);
}

TEST_F(Compile, NoneThatIsNewerThanTheDriver) {
  const OpenedCompiler old = open_compiler("", 1000);  // no driver is that old
  EXPECT_EQ(old.compiler, nullptr);
  EXPECT_NE(old.why.find("whose code the driver, CUDA 1.0, does not run"), std::string::npos) << old.why;
  EXPECT_EQ(open_compiler("", compiler_->version).compiler, compiler_);
}

TEST(OpenCompiler, LibrariesThatAreNone) {
  EXPECT_EQ(open_compiler("/nowhere/libnvrtc.so", 0).why, "/nowhere/libnvrtc.so cannot be opened");
  EXPECT_EQ(open_compiler("/nowhere/libnvrtc.so", 0).compiler, nullptr);
  EXPECT_EQ(open_compiler("libm.so.6", 0).why.find("libm.so.6 lacks nvrtc"), 0u);
}

TEST(Version, AsText) {
  EXPECT_EQ(version_text(13000), "13.0");
  EXPECT_EQ(version_text(12080), "12.8");
  EXPECT_EQ(version_text(11080), "11.8");
}

}  // namespace
}  // namespace tessera::cuda
