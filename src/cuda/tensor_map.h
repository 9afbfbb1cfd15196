// An operand as Hopper's copy engine sees it, which brings boxes of it to shared memory.
#pragma once
#include "core/plan.h"
#include "cuda/driver.h"
#include "rules/params.h"

namespace tessera::cuda {

// What such a map cannot be of: a sentence, or nothing.
std::string refuse_map(const core::Problem& p, int name);

std::string refuse_grid(const core::Problem& p, int name);  // the same of bias or keep

// Of q, k or v in 16 bits: dimensions (dim, row, head, plane), where a packed operand has one plane; boxes of 64
// columns and `rows` rows of one head, swizzled by 128 bytes, zeros out of bounds. An operand without elements has a
// map of zeros, from which nothing can be loaded. Throws Error(TESSERA_FAILED) with what the driver says.
rules::TensorMap tensor_map(const Driver& driver, const core::Problem& p, const core::Bindings& bound, int name,
                            int rows);

// Of bias in q's dtype or of keep, for tiles of 64 queries and `tile_keys` keys: dimensions (key, query, head, batch),
// where one that repeats has one element; boxes of at most 128 bytes, swizzled by their width. Absent: no bytes.
rules::GridMap grid_map(const Driver& driver, const core::Problem& p, const core::Bindings& bound, int name,
                        int tile_keys);

}  // namespace tessera::cuda
