// The kernel pack: what is read back, what is refused, which image a chip is given.
#include "cuda/pack.h"

#include <algorithm>
#include <cstring>

#include "child.h"
#include "cuda/cuda.h"
#include "cuda/loaded.h"
#include "cuda/sources.h"
#include "made_pack.h"
#include "tests/core/refusal.h"

namespace tessera::cuda {
namespace {

using core::expect_says;
using core::refusal;
using test::Folder;
using test::in_child;
using test::made_image;

const std::string any_bytes("one\nline\0zero\xFF", 14);  // an image may hold anything

Pack two_kernels() {
  return {.sources = "0123abcd",
          .compiler = 13000,
          .kernels = {{"forward a=1", made_image({80, false}, any_bytes, 168, 4)},
                      {"forward a=2 b=3", made_image({90, true}, "text of PTX")}}};
}

TEST(Pack, RoundTrip) {
  const Pack pack = parse_pack(to_bytes(two_kernels()));
  EXPECT_EQ(pack.sources, "0123abcd");
  EXPECT_EQ(pack.compiler, 13000);
  ASSERT_EQ(pack.kernels.size(), 2u);
  const auto& [code, image] = pack.kernels[0];
  EXPECT_EQ(code, "forward a=1");
  EXPECT_EQ(image.target, (Target{80, false}));
  EXPECT_EQ(unpacked(image).bytes, any_bytes);
  EXPECT_EQ(image.registers, 168);
  EXPECT_EQ(image.spill_bytes, 4);
  EXPECT_EQ(pack.kernels[1].code, "forward a=2 b=3");
  EXPECT_EQ(pack.kernels[1].image.target, (Target{90, true}));
  EXPECT_EQ(unpacked(pack.kernels[1].image).bytes, "text of PTX");
}

// Also of chips that no pack ships for: what is compiled for them at first use is kept in such a file.
TEST(Pack, EveryTargetIsReadBack) {
  for (const int arch : {75, 80, 86, 87, 88, 89, 90, 100, 101, 103, 110, 120, 121, 130})
    for (const bool ptx : {false, true}) {
      const Target target = {arch, ptx};
      const std::string bytes = to_bytes({.sources = "s", .compiler = 1, .kernels = {{"c", made_image(target, "x")}}});
      EXPECT_EQ(refusal([&] { EXPECT_EQ(parse_pack(bytes).kernels[0].image.target, target); }).message, "")
          << text(target);
    }
  EXPECT_TRUE(parse_pack(to_bytes({.sources = "s", .compiler = 1, .kernels = {}})).kernels.empty());
}

// Where image n of two_kernels() begins.
size_t place_of(const std::string& whole, size_t n) {
  size_t at = whole.size();
  for (size_t later = n; later < 2; ++later) at -= packed(two_kernels().kernels[later].image).bytes.size();
  return at;
}

TEST(Pack, TruncatedAnywhereIsRefused) {
  const std::string whole = to_bytes(two_kernels());
  const size_t head = place_of(whole, 0);
  for (size_t length = 0; length < whole.size(); ++length)
    expect_says(refusal([&] { parse_pack(whole.substr(0, length)); }), TESSERA_FAILED, "the kernel pack is broken: ");
  // In words: within each line of the head, within each image.
  for (const char* line : {"tessera-pack", "sources", "compiler", "kernels", "sm_80", "compute_90"})
    expect_says(refusal([&] { parse_pack(whole.substr(0, whole.find(line) + 3)); }), TESSERA_FAILED,
                "its head ends early; build it again");
  for (const size_t length : {head, head + 3, whole.size() - 1})
    expect_says(refusal([&] { parse_pack(whole.substr(0, length)); }), TESSERA_FAILED, "it ends early; build it again");
}

TEST(Pack, AFlippedByteInAnImageIsRefused) {
  const std::string whole = to_bytes(two_kernels());
  const size_t head = place_of(whole, 0), second = place_of(whole, 1);
  for (size_t at = head; at < whole.size(); ++at) {
    std::string flipped = whole;
    flipped[at] = static_cast<char>(flipped[at] ^ 1);
    expect_says(
        refusal([&] { parse_pack(flipped); }), TESSERA_FAILED,
        at < second ? "the bytes of 0 are not those it was made of" : "the bytes of 1 are not those it was made of");
  }
}

TEST(Pack, WhatIsNoPackIsRefused) {
  const auto says = [](const char* fragment, const char* from, const char* to) {
    std::string bytes = to_bytes(two_kernels());
    bytes.replace(bytes.find(from), std::strlen(from), to);
    expect_says(refusal([&] { parse_pack(bytes); }), TESSERA_FAILED, fragment);
  };
  says("it does not begin with \"tessera-pack 2\"", "tessera-pack 2", "tessera-pack 1");
  says("it does not begin with \"tessera-pack 2\"", "tessera-pack 2",
       "\x7F"
       "ELF");
  says("\"sources\" is expected, \"source 0123abcd\" found", "sources 0123abcd", "source 0123abcd");
  says("\"compiler\" is expected", "compiler", "compilers");
  says("\"kernels\" is expected", "kernels", "Kernels");
  const std::string first = fmt::format("sm_80 {} ", packed(two_kernels().kernels[0].image).bytes.size());
  says("line 0 of its kernels is no kernel", first.c_str(), "sm_80 9999999 ");
  says("line 0 of its kernels is no kernel", first.c_str(), "sm_80 -1 ");
  for (const char* target : {"sm_", "sm_x", "sm_80a", "sm80", "SM_80", "ptx_80"})
    says("line 0 of its kernels is no kernel", "sm_80", target);
  const std::string second = fmt::format("compute_90 {} ", packed(two_kernels().kernels[1].image).bytes.size());
  says("line 1 of its kernels is no kernel", second.c_str(), "compute_90 eleven ");
  says("line 1 of its kernels is no kernel", " forward a=2 b=3", "");
}

TEST(Pack, FilesThatAreNotThere) {
  const Folder folder;
  expect_says(refusal([&] { read_pack(folder / "tessera.pack"); }), TESSERA_FAILED, "cannot be read");
  expect_says(refusal([&] { read_pack(folder.path()); }), TESSERA_FAILED, "no kernel pack");  // a folder is no file
  EXPECT_FALSE(read_file(folder / "none"));
  EXPECT_EQ(write_file(folder / "empty", ""), "");
  EXPECT_EQ(read_file(folder / "empty"), "");
  expect_says(refusal([&] { read_pack(folder / "empty"); }), TESSERA_FAILED, "its head ends early");
}

TEST(Pack, FilesAreWrittenWhole) {
  const Folder folder;
  EXPECT_EQ(write_file(folder / "a", any_bytes), "");
  EXPECT_EQ(write_file(folder / "a", "other"), "");
  EXPECT_EQ(read_file(folder / "a"), "other");
  EXPECT_EQ(folder.files(), std::vector{folder / "a"});
  EXPECT_NE(write_file(folder / "none/a", "x").find("No such file"), std::string::npos);
  std::filesystem::create_directory(folder / "b");
  EXPECT_NE(write_file(folder / "b", "x").find("s a directory"), std::string::npos);
  EXPECT_EQ(folder.files().size(), 2u) << "a temporary file was left";
}

TEST(Pack, NamesOfTargets) {
  EXPECT_EQ(text(Target{90, false}), "sm_90");
  EXPECT_EQ(text(Target{80, true}), "compute_80");
}

// ------------------------------------------------------------------------------------------------- choosing an image

// What a device of `arch` runs of a pack with these targets; "none".
std::string choice(const std::vector<Target>& targets, int arch, bool only_arch = false) {
  const Code code = {.text = "mine",
                     .source = {},
                     .entry = nullptr,
                     .threads = 0,
                     .shared_bytes = 0,
                     .least_arch = arch,
                     .only_arch = only_arch};
  Pack pack;
  for (const Target& target : targets) {
    pack.kernels.push_back({"other", made_image(target, "x")});
    pack.kernels.push_back({"mine", made_image(target, "x")});
  }
  const Image* const image = image_for(pack, code, arch);
  if (!image) return "none";
  const bool mine = std::any_of(pack.kernels.begin(), pack.kernels.end(),
                                [&](const PackedKernel& k) { return &k.image == image && k.code == "mine"; });
  return mine ? text(image->target) : "another kernel's";
}

TEST(ImageFor, EveryChipRunsTheLatestOfItsMajorVersion) {
  constexpr struct {
    int arch;
    const char* image;
  } shipped[] = {{60, "none"},        {75, "sm_75"},   {80, "sm_80"},   {86, "sm_80"},      {87, "sm_80"},
                 {89, "sm_80"},       {90, "sm_90"},   {95, "sm_90"},   {100, "sm_100"},    {103, "sm_100"},
                 {110, "compute_80"}, {120, "sm_120"}, {121, "sm_120"}, {130, "compute_80"}};
  for (const auto& [arch, image] : shipped) EXPECT_EQ(choice(shipped_targets(), arch), image) << "sm_" << arch;
}

TEST(ImageFor, TheOrderInThePackDoesNotMatter) {
  std::vector<Target> targets = {{80, false}, {86, false}, {80, true}, {90, true}};
  std::sort(targets.begin(), targets.end(), [](const Target& a, const Target& b) { return text(a) < text(b); });
  do {
    EXPECT_EQ(choice(targets, 80), "sm_80");
    EXPECT_EQ(choice(targets, 86), "sm_86");
    EXPECT_EQ(choice(targets, 89), "sm_86");
    EXPECT_EQ(choice(targets, 90), "compute_90");
    EXPECT_EQ(choice(targets, 75), "none");
  } while (std::next_permutation(targets.begin(), targets.end(),
                                 [](const Target& a, const Target& b) { return text(a) < text(b); }));
}

TEST(ImageFor, NeverTheCodeOfALaterMinorVersionNorOfAnotherMajorOne) {
  EXPECT_EQ(choice({{86, false}}, 80), "none");
  EXPECT_EQ(choice({{89, false}, {86, false}}, 87), "sm_86");
  EXPECT_EQ(choice({{103, false}}, 100), "none");
  EXPECT_EQ(choice({{120, false}}, 121), "sm_120");
  EXPECT_EQ(choice({{90, false}}, 100), "none");
  EXPECT_EQ(choice({{100, false}}, 110), "none");
  EXPECT_EQ(choice({{90, true}}, 89), "none");
  EXPECT_EQ(choice({{80, true}, {80, false}}, 89), "sm_80");  // machine code before PTX
}

TEST(ImageFor, CodeOfOneChipRunsThereAlone) {
  EXPECT_EQ(choice({{80, true}, {90, false}}, 90, true), "sm_90");
  for (const int arch : {89, 91, 95, 100}) EXPECT_EQ(choice({{80, true}, {90, false}}, arch, true), "none");
  EXPECT_EQ(choice({{80, true}, {90, true}}, 90, true), "none");
}

// ---------------------------------------------------------------------------------------------- beside this library

TEST(ShippedPack, OfTheseSourcesIsTaken) {
  in_child({}, [] {
    test::put_pack(test::made_pack());
    EXPECT_EQ(shipped_pack().why, "");
    ASSERT_TRUE(shipped_pack().pack.has_value());
    const std::vector<KernelFacts> facts = shipped_kernels();
    EXPECT_EQ(facts.size(), test::made_pack().kernels.size());
    for (const KernelFacts& f : facts) {
      EXPECT_EQ(f.origin, "pack");
      EXPECT_EQ(f.registers, 100);
      EXPECT_GT(f.code_bytes, 0);
    }
  });
}

TEST(ShippedPack, OfOtherSourcesIsRefused) {
  in_child({}, [] {
    Pack pack = test::made_pack();
    pack.sources[0] = pack.sources[0] == '0' ? '1' : '0';
    test::put_pack(pack);
    EXPECT_FALSE(shipped_pack().pack.has_value());
    EXPECT_NE(shipped_pack().why.find("was made of other sources than this library; build it again"), std::string::npos)
        << shipped_pack().why;
    for (const KernelFacts& f : shipped_kernels()) EXPECT_EQ(f.origin, "compiled at first use");
    EXPECT_EQ(shipped_kernels().size(), shipped().size());
    const Folder folder;
    expect_says(refusal([&] { dump_pack(folder.path()); }), TESSERA_FAILED, "made of other sources");
  });
}

TEST(ShippedPack, BrokenOrAbsentIsToldInOneSentence) {
  in_child({}, [] {
    test::put_bytes(to_bytes(test::made_pack()).substr(0, 100));
    EXPECT_FALSE(shipped_pack().pack.has_value());
    EXPECT_NE(shipped_pack().why.find("the kernel pack is broken: its head ends early"), std::string::npos);
  });
  in_child({}, [] {
    test::no_pack();
    EXPECT_FALSE(shipped_pack().pack.has_value());
    EXPECT_EQ(shipped_pack().why, "no kernel pack: " + shipped_pack().path + " cannot be read");
  });
}

TEST(ShippedPack, IsTakenApartIntoAFileAnImage) {
  in_child({}, [] {
    test::put_pack(test::made_pack());
    const Folder folder;
    dump_pack(folder / "new");
    size_t files = 0;
    for (const auto& kernel : test::made_pack().kernels) {
      std::string name = kernel.code;
      std::replace(name.begin(), name.end(), ' ', '.');
      const bool ptx = kernel.image.target.ptx;
      const std::string path = folder / ("new/" + name + "." + text(kernel.image.target) + (ptx ? ".ptx" : ".cubin"));
      EXPECT_EQ(read_file(path), unpacked(kernel.image).bytes) << path;
      ++files;
    }
    const auto all = std::filesystem::directory_iterator(folder / "new");
    EXPECT_EQ(static_cast<size_t>(std::distance(begin(all), end(all))), files);
    EXPECT_EQ(write_file(folder / "file", ""), "");
    expect_says(refusal([&] { dump_pack(folder / "file/under"); }), TESSERA_FAILED, "Not a directory");
  });
}

}  // namespace
}  // namespace tessera::cuda
