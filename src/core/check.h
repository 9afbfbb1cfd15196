// Is it a question at all?
#pragma once
#include "core/operand.h"

namespace tessera::core {

// Throws Error(TESSERA_INVALID) with the argument, its value, the rule and the way out.
void check(const Problem& p);

// Its part about caches, rotation and quantised k and v.
void check_cache_sizes(const Problem& p);
void check_cache(const Problem& p);

// Strides that addresses can be made of, and elements of an output that do not share addresses.
void check_strides(const char* text, const Operand& o);
void check_places(const char* text, const Operand& o);

// Does anything depend on where query rows sit on the key axis?
bool needs_corner(const Problem& p);

}  // namespace tessera::core
