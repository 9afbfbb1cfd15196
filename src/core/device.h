// Facts of devices: this machine's processor, and those whose facts are known, so that plans can be made for them.
#pragma once
#include <string>

#include "tessera/tessera.h"

namespace tessera::core {

using Device = tessera_device;

Device find_device(const std::string& name);  // throws Error(TESSERA_INVALID) naming those known
const char* known_device(int index);
// Peak rates of a GPU that was asked for its name, from the known ones; left alone if it is none of them.
void fill_rates(Device& device);
const char* isa_text(int isa);

}  // namespace tessera::core
