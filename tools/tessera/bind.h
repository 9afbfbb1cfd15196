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

// Copies every input. Lengths that the file does not have are the line's.
void bind_files(Case& c, const TensorFile& file);

// Copies lengths and what the mask needs, and nothing else.
void bind_mask(Case& c, const TensorFile& file);

std::vector<OwnedTensor> to_tensors(const Case& c, const std::vector<int>& names);

}  // namespace tessera::tools
