// The safetensors file format: 8 bytes of header length, a JSON header, the tensors' bytes without gap or overlap.
// https://github.com/huggingface/safetensors#format
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace tessera::tools {

struct FileTensor {
  std::string dtype;  // as the format spells it: F64 F32 F16 BF16 I32 BOOL ...
  std::vector<int64_t> shape;
  int64_t begin = 0;  // bytes from the start of the data
  int64_t end = 0;
};

std::string shape_text(const std::vector<int64_t>& shape);  // "[2, 3]"

// A file whose header has been read and checked in full; tensors are read when asked for.
class TensorFile {
 public:
  explicit TensorFile(const std::string& path);

  const std::string& path() const { return path_; }
  const std::map<std::string, FileTensor>& tensors() const { return tensors_; }
  bool has(const std::string& name) const { return tensors_.count(name) != 0; }
  const FileTensor& at(const std::string& name) const;
  std::vector<std::byte> read(const std::string& name) const;

 private:
  std::string path_;
  int64_t data_begin_ = 0;
  std::map<std::string, FileTensor> tensors_;
};

struct OwnedTensor {
  std::string name;
  std::string dtype;
  std::vector<int64_t> shape;
  std::vector<std::byte> bytes;
};

void write_tensors(const std::string& path, const std::vector<OwnedTensor>& tensors,
                   const std::map<std::string, std::string>& metadata);

}  // namespace tessera::tools
