#include "files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "status.h"

namespace tessera::tools {
namespace {

std::string why() {
  return std::strerror(errno);
}

// A signal handler may read nothing else. The tool writes one file at a time.
std::array<char, 4096> unfinished{};

constexpr std::array deadly{SIGINT, SIGTERM, SIGHUP};

extern "C" void remove_unfinished(int signal) {
  ::unlink(unfinished.data());
  ::raise(signal);  // SA_RESETHAND: the second one kills
}

// Owns the temporary: it goes away unless `keep_as` has renamed it.
class Temporary {
 public:
  explicit Temporary(const std::string& target) : target_(target), name_(target + ".XXXXXX") {
    if (name_.size() >= unfinished.size()) throw invalid("{}: the name is too long; give a shorter one", target);
    const int handle = ::mkstemp(name_.data());
    if (handle < 0) throw invalid("{}: cannot write: {}; choose a folder that exists and is writable", target, why());
    std::memcpy(unfinished.data(), name_.c_str(), name_.size() + 1);
    for (size_t n = 0; n < deadly.size(); ++n) {
      struct sigaction action {};
      action.sa_handler = remove_unfinished;
      action.sa_flags = static_cast<int>(SA_RESETHAND | SA_NODEFER);
      ::sigaction(deadly[n], &action, &former_[n]);
    }
    file_ = ::fdopen(handle, "wb");
    const mode_t mask = ::umask(0);  // mkstemp gives 0600; a file written by fopen would have 0666 less the mask
    ::umask(mask);
    ::fchmod(handle, 0666 & ~mask);
  }
  Temporary(const Temporary&) = delete;
  Temporary& operator=(const Temporary&) = delete;
  ~Temporary() {
    if (file_) std::fclose(file_);
    if (!kept_) ::unlink(name_.c_str());
    for (size_t n = 0; n < deadly.size(); ++n) ::sigaction(deadly[n], &former_[n], nullptr);
  }

  std::FILE* file() const { return file_; }

  void keep() {
    const bool flushed = std::fflush(file_) == 0 && !std::ferror(file_) && ::fsync(::fileno(file_)) == 0;
    const bool closed = flushed && std::fclose(std::exchange(file_, nullptr)) == 0;
    if (!closed || std::rename(name_.c_str(), target_.c_str()) != 0)
      throw invalid("{}: cannot write: {}; nothing was left there", target_, why());
    kept_ = true;
  }

 private:
  std::string target_, name_;
  std::FILE* file_ = nullptr;
  bool kept_ = false;
  std::array<struct sigaction, deadly.size()> former_{};
};

// A rename would replace a link, or a device such as /dev/null, by a file: follow the first, refuse the second.
std::string target_of(const std::string& path) {
  namespace fs = std::filesystem;
  std::error_code ignored;
  const std::string target = fs::is_symlink(path, ignored) ? fs::weakly_canonical(path, ignored).string() : path;
  if (fs::exists(target, ignored) && !fs::is_regular_file(target, ignored))
    throw invalid("{}: is not a regular file; give the name of one, or a new name", path);
  return target;
}

}  // namespace

File open_file(const std::string& path, int64_t& bytes) {
  File file(std::fopen(path.c_str(), "rb"));
  if (!file) throw invalid("{}: cannot read: {}; check the name", path, why());
  struct stat facts {};
  if (::fstat(::fileno(file.get()), &facts) != 0) throw invalid("{}: cannot read: {}", path, why());
  if (!S_ISREG(facts.st_mode)) throw invalid("{}: is not a regular file; give the name of one", path);
  bytes = facts.st_size;
  return file;
}

void check_writable(const std::string& path, const std::vector<std::string>& inputs) {
  std::error_code ignored;
  for (const std::string& input : inputs)
    if (std::filesystem::equivalent(path, input, ignored))
      throw invalid("{}: is the file of inputs {}; give the output another name", path, input);
  const Temporary temporary(target_of(path));
}

void write_file(const std::string& path, const std::function<void(std::FILE*)>& fill) {
  Temporary temporary(target_of(path));
  fill(temporary.file());
  temporary.keep();
}

}  // namespace tessera::tools
