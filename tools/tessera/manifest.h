// What ran where: enough to repeat a measurement.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace tessera::tools {

using Json = nlohmann::ordered_json;

std::string cpu_model();
std::string isa_text(int isa);
Json gpus();  // {"count", "driver", "note"}: what libcuda says, or why it says nothing
Json versions();
std::string commit();

// {"device", "instruction_sets", "threads", "driver", "os", "versions", "commit"}
Json manifest(int threads);

// "key   value" lines; objects are indented.
std::string text_of(const Json& facts, const std::string& indent = "");

}  // namespace tessera::tools
