// Tensors of files and operands of memory: names, file shapes and strides.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "case.h"
#include "safetensors.h"

namespace tessera::tools {

// Copies the operand from the tensor of its name; says no if dtype or shape differ.
void bind_tensor(Case& c, int name, const TensorFile& file);
// The same from a tensor of another name.
void bind_tensor(Case& c, int name, const TensorFile& file, const std::string& text);

// The tensors of several files. A name is in one of them.
class TensorFiles {
 public:
  explicit TensorFiles(const std::vector<std::string>& paths);
  bool has(const std::string& name) const;
  const TensorFile& with(const std::string& name) const;  // the file that has it, or the only one
  std::string paths() const;                              // comma between

 private:
  std::vector<TensorFile> files_;
};

// Copies every input. Lengths that the files do not have are the line's.
void bind_files(Case& c, const TensorFiles& files);

// A note for each input that the files have and the line does not use.
std::string unused_inputs(const Case& c, const TensorFiles& files);

// Copies lengths and what the mask needs, and nothing else.
void bind_mask(Case& c, const TensorFiles& files);

std::vector<OwnedTensor> to_tensors(const Case& c, const std::vector<int>& names);

}  // namespace tessera::tools
