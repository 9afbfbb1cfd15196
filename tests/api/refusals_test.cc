// The sentences with which kernels decline, as a caller reads them when nothing is left.
#include <gtest/gtest.h>

#include <tessera/tessera.hpp>

namespace {

std::string why(const std::string& line, const std::string& device, const std::string& kernels) {
  tessera::Device where;
  tessera::Device::find(device, where).or_throw();
  tessera::Plan plan;
  const tessera::Status status =
      tessera::Plan::make(tessera::Line(line).problem(), where, tessera::Hints().kernels(kernels), plan);
  EXPECT_EQ(status.code(), TESSERA_UNSUPPORTED);
  return status.message();
}
void expect_in(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << text;
}

TEST(Refusals, EveryKernelSaysWhy) {
  const std::string forward = "forward f32 q8 k8 d16", bf16 = "forward bf16 q8 k8 d16";
  expect_in(why(forward, "h200", "cpu"), "cpu.avx512: device h200 is a GPU, the kernel runs on a processor");
  expect_in(why(forward, "h200", "reference"), "device h200 is a GPU; the reference engine runs on the host's memory");
  expect_in(why(bf16, "avx2", "cpu.avx512bf16"), "cpu.avx512bf16: needs avx512bf16, device avx2 has avx2");
  expect_in(why(forward, "avx512bf16", "cpu.avx512bf16"), "cpu.avx512bf16: its products are bf16, q is f32");
  expect_in(why("backward bf16 q8 k8 d16", "avx512bf16", "cpu.avx512bf16"),
            "its products are bf16, backward keeps P and dS in float32");
  expect_in(why("append bf16 n2 k8 d16", "avx512bf16", "cpu.avx512bf16"), "an append has no products");
  expect_in(why("decode bf16 k8 d16 kv=e4m3", "avx512bf16", "cpu.avx512bf16"),
            "its products are bf16, k is e4m3 times a scale");
  expect_in(why(forward, "avx2", "cpu.avx512"), "cpu.baseline: only cpu.avx512 may be chosen");
  expect_in(why("forward f64 q8 k8 d16", "h200", "cuda"), "cuda.portable: its products are bf16 or f16, q is f64");
  expect_in(why("forward f64 q8 k8 d16", "h200", "cuda"), "cuda.sm90: its products are bf16 or f16, q is f64");
  expect_in(why("forward f64 q8 k8 d16", "h200", "cuda"), "cuda.general: float64 is computed on processors only");
  expect_in(why("backward bf16 q8 k8 d64", "h200", "cuda.portable"), "cuda.portable: it attends forward only");
  expect_in(why(bf16, "t4", "cuda"), "cuda.general: q is bf16 and device t4 is sm_75; its tensor cores take f16");
}

}  // namespace
