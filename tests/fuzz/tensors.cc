// Bytes as a safetensors file: read whole and bound to problems, or refused in words.
#include <sys/mman.h>
#include <unistd.h>

#include "fuzz.h"
#include "tools/tessera/bind.h"
#include "tools/tessera/status.h"

namespace tessera::fuzz {
namespace {

// A file in memory, with a name that the reader can open.
class MemoryFile {
 public:
  MemoryFile() : handle_(::memfd_create("fuzz", MFD_CLOEXEC)) { need(handle_ >= 0, "memfd_create failed"); }
  void fill(const uint8_t* data, size_t size) {
    need(::ftruncate(handle_, 0) == 0 && ::pwrite(handle_, data, size, 0) == static_cast<ssize_t>(size),
         "{} bytes cannot be written", size);
  }
  std::string path() const { return fmt::format("/proc/self/fd/{}", handle_); }

 private:
  int handle_;
};

// Nothing but an Error with words may come out.
template <class Read>
bool reads(Read read) {
  try {
    read();
    return true;
  } catch (const tools::Error& error) {
    need(error.code == TESSERA_INVALID && *error.what(), "code {}: \"{}\"", error.code, error.what());
    return false;
  }
}

void read_all(const tools::TensorFile& file, size_t size) {
  size_t bytes = 0;
  for (const auto& [name, tensor] : file.tensors()) bytes += file.read(name).size();
  need(bytes <= size, "{} bytes of tensors in a file of {}", bytes, size);
}

// The seeds (seeds.py) are files for these lines.
constexpr const char* lines[] = {
    "forward f32 b2 h2/1 q2 k3 d2 mask=keep&exclude_keys bias=1,h,1,k alibi sink",
    "backward bf16 h2/1 d1 varlen=q[1,2]k[2,0] dlse",
    "decode f32 b2 k4 d2 page=2 cache_batch_idx cache_rows=2 left_pad append rotary=2 kv=e4m3:token/head status",
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static MemoryFile memory;
  memory.fill(data, size);
  const std::string path = memory.path();
  const bool sound = reads([&] { read_all(tools::TensorFile(path), size); });
  for (const char* line : lines) {
    tools::Case c{tools::Line(line)};
    reads([&] {
      const tools::TensorFiles files({path});
      need(sound, "read the second time only");
      tools::unused_inputs(c, files);
      tools::bind_files(c, files);
    });
  }
  return 0;
}

}  // namespace tessera::fuzz
