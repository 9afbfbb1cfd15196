// Compiled kernels on disk: what is read back, what is as good as none, and that nothing but time is ever lost.
#include "cuda/cache.h"

#include <sys/resource.h>

#include <csignal>

#include "child.h"
#include "cuda/pack.h"
#include "made_pack.h"

namespace tessera::cuda {
namespace {

using test::Folder;
using test::in_child;

constexpr Target target = {90, false};

// All bytes and the registers are of `letter`: a mixture of two would be seen.
Image image_of(char letter, size_t bytes = 200'000) {
  return test::made_image(target, std::string(bytes, letter), letter, 3);
}
bool is_whole(const Image& image) {
  return !image.bytes.empty() && image.bytes == image_of(static_cast<char>(image.registers)).bytes;
}
std::string only_file(const Folder& folder) {
  const std::vector<std::string> files = folder.files();
  EXPECT_EQ(files.size(), 1u);
  return files.empty() ? "" : files[0];
}

TEST(Cache, RoundTrip) {
  const Folder folder;
  EXPECT_FALSE(read_cached(folder.path(), "key", target));
  EXPECT_EQ(write_cached(folder.path(), "key", image_of('a')), "");
  const std::optional<Image> image = read_cached(folder.path(), "key", target);
  ASSERT_TRUE(image);
  EXPECT_EQ(image->target, target);
  EXPECT_EQ(image->bytes, image_of('a').bytes);
  EXPECT_EQ(image->registers, 'a');
  EXPECT_EQ(image->spill_bytes, 3);
  EXPECT_FALSE(read_cached(folder.path(), "another key", target));
  EXPECT_FALSE(read_cached(folder.path(), "key", Target{80, false}));
  EXPECT_FALSE(read_cached(folder.path(), "key", Target{90, true}));
}

TEST(Cache, FoldersAreMade) {
  const Folder folder;
  EXPECT_EQ(write_cached(folder / "one/two", "key", image_of('a')), "");
  EXPECT_TRUE(read_cached(folder / "one/two", "key", target));
}

TEST(Cache, WhatIsBrokenIsAsGoodAsNoneAndIsWrittenAgain) {
  const Folder folder;
  ASSERT_EQ(write_cached(folder.path(), "key", image_of('a')), "");
  const std::string path = only_file(folder);
  const std::string whole = *read_file(path);
  const auto none = [&](const char* what, const std::string& bytes) {
    ASSERT_EQ(write_file(path, bytes), "");
    EXPECT_FALSE(read_cached(folder.path(), "key", target)) << what;
    ASSERT_EQ(write_cached(folder.path(), "key", image_of('b')), "") << what;
    const std::optional<Image> again = read_cached(folder.path(), "key", target);
    EXPECT_TRUE(again && again->registers == 'b' && is_whole(*again)) << what;
    EXPECT_EQ(only_file(folder), path);
  };
  none("empty", "");
  none("garbage", std::string(5000, '\xA5'));
  none("a line of garbage", "tessera\n");
  for (const size_t length : {size_t{5}, size_t{20}, whole.size() / 2, whole.size() - 1})
    none("truncated", whole.substr(0, length));
  std::string flipped = whole;
  flipped.back() = 'b';
  none("a byte is another", flipped);
  Pack two = parse_pack(whole);
  two.kernels.push_back(two.kernels[0]);
  none("two kernels", to_bytes(two));
  two.kernels.clear();
  none("no kernel", to_bytes(two));
}

TEST(Cache, WhatWasMadeOfSomethingElseIsStale) {
  const Folder folder;
  ASSERT_EQ(write_cached(folder.path(), "new key", image_of('n')), "");
  const std::string path = only_file(folder);
  // The file of an old key under the name of the new one, as if their hashes were equal.
  const Folder other;
  ASSERT_EQ(write_cached(other.path(), "old key", image_of('o')), "");
  ASSERT_EQ(write_file(path, *read_file(only_file(other))), "");
  EXPECT_FALSE(read_cached(folder.path(), "new key", target));
  // The right key, for another target.
  Pack pack = {.sources = "new key", .compiler = 0, .kernels = {{"cached", image_of('o')}}};
  pack.kernels[0].image.target = {80, false};
  ASSERT_EQ(write_file(path, to_bytes(pack)), "");
  EXPECT_FALSE(read_cached(folder.path(), "new key", target));
  ASSERT_EQ(write_cached(folder.path(), "new key", image_of('n')), "");
  EXPECT_TRUE(read_cached(folder.path(), "new key", target));
}

// Files are renamed into place, so once there is one, whoever looks finds one, and it is whole.
TEST(Cache, ProcessesThatWriteAndReadOneKeyAtOnceNeverMeetHalfAnImage) {
  const Folder folder;
  ASSERT_EQ(write_cached(folder.path(), "key", image_of('z')), "");
  for (int round = 0; round < 3; ++round) {
    std::vector<pid_t> children;
    for (const char letter : {'a', 'b', 'c'}) {
      const pid_t child = ::fork();
      ASSERT_GE(child, 0);
      if (child > 0) {
        children.push_back(child);
        continue;
      }
      int wrong = 0;
      for (int n = 0; n < 100; ++n) {
        wrong += !write_cached(folder.path(), "key", image_of(letter)).empty();
        const std::optional<Image> image = read_cached(folder.path(), "key", target);
        wrong += !image || !is_whole(*image);
      }
      ::_exit(std::min(wrong, 100));
    }
    for (const pid_t child : children) {
      int status = 0;
      ASSERT_EQ(::waitpid(child, &status, 0), child);
      EXPECT_TRUE(WIFEXITED(status)) << status;
      EXPECT_EQ(WEXITSTATUS(status), 0) << "writes that failed, or reads of nothing or of half an image";
    }
    EXPECT_EQ(folder.files().size(), 1u) << "a temporary file was left";
  }
}

TEST(Cache, AFolderThatCannotBeMadeLosesNothingButTheCache) {
  const Folder folder;
  ASSERT_EQ(write_file(folder / "file", "mine"), "");
  const std::string why = write_cached(folder / "file/cache", "key", image_of('a'));
  EXPECT_NE(why.find("file/cache: Not a directory"), std::string::npos) << why;
  EXPECT_FALSE(read_cached(folder / "file/cache", "key", target));
  EXPECT_EQ(read_file(folder / "file"), "mine");
  const std::string none = write_cached("", "key", image_of('a'));
  EXPECT_NE(none.find("no cache folder: neither TESSERA_CACHE, XDG_CACHE_HOME nor HOME is set"), std::string::npos)
      << none;
  EXPECT_FALSE(read_cached("", "key", target));
}

// Which no compression makes smaller.
Image image_of_noise(size_t bytes) {
  Image image = image_of('a', bytes);
  uint32_t state = 1;
  for (char& c : image.bytes) c = static_cast<char>((state = state * 1664525u + 1013904223u) >> 24);
  return image;
}

TEST(Cache, AFullDiskLosesNothingButTheCache) {
  const Folder folder;
  in_child({}, [&] {
    std::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit = {.rlim_cur = 1000, .rlim_max = 1000};  // bytes of a file
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
    for (const size_t bytes : {size_t{1500}, size_t{200'000}}) {  // less and more than a stream's buffer
      const std::string why = write_cached(folder.path(), "key", image_of_noise(bytes));
      EXPECT_NE(why.find("File too large"), std::string::npos) << why;
      EXPECT_FALSE(read_cached(folder.path(), "key", target));
      EXPECT_TRUE(folder.files().empty()) << folder.files()[0];
    }
    // What was there before stays.
    ASSERT_EQ(write_cached(folder.path(), "key", image_of('b', 10)), "");
    EXPECT_NE(write_cached(folder.path(), "key", image_of_noise(2000)), "");
    const std::optional<Image> image = read_cached(folder.path(), "key", target);
    EXPECT_TRUE(image && image->bytes == std::string(10, 'b'));
    EXPECT_EQ(folder.files().size(), 1u);
  });
}

TEST(Cache, WhereItLies) {
  in_child({{"TESSERA_CACHE", "/t"}, {"XDG_CACHE_HOME", "/x"}, {"HOME", "/h"}}, [] {
    EXPECT_EQ(cache_folder(), "/t");
    ::setenv("TESSERA_CACHE", "", 1);  // empty is as good as not set
    EXPECT_EQ(cache_folder(), "/x/tessera");
    ::unsetenv("XDG_CACHE_HOME");
    EXPECT_EQ(cache_folder(), "/h/.cache/tessera");
    ::unsetenv("HOME");
    EXPECT_EQ(cache_folder(), "");
  });
}

}  // namespace
}  // namespace tessera::cuda
