// Processes and folders of a test's own.
#pragma once
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

namespace tessera::test {

// A folder that goes when the test does.
class Folder {
 public:
  Folder() {
    std::string name = testing::TempDir() + "tessera_cuda_XXXXXX";
    path_ = ::mkdtemp(name.data());
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  const std::string& path() const { return path_; }
  std::vector<std::string> files() const {
    std::vector<std::string> all;
    for (const auto& entry : std::filesystem::directory_iterator(path_)) all.push_back(entry.path().string());
    return all;
  }

 private:
  std::string path_;
};

using Environment = std::vector<std::pair<const char*, std::string>>;

// The driver is opened, the pack read and a kernel loaded once a process. A test that touches them runs in a child,
// which begins without any; what it expects in vain is printed there and fails the test here.
template <class Test>
void in_child(const Environment& environment, Test&& test) {
  std::fflush(nullptr);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    for (const auto& [name, value] : environment) ::setenv(name, value.c_str(), 1);
    try {
      test();
    } catch (const std::exception& error) {
      ADD_FAILURE() << error.what();
    }
    std::fflush(nullptr);
    ::_exit(testing::Test::HasFailure());
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "the child's own words are above; status " << status;
}

}  // namespace tessera::test
