// tessera info: this machine and this build.
#include "manifest.h"
#include "verb.h"

namespace tessera::tools {
namespace {

struct Options {
  bool json = false;
};

int perform(const Options& o) {
  const tessera_device host = find_device("host");
  Json known = Json::array();
  for (int32_t n = 0; const char* name = tessera_device_known(n); ++n) known.push_back(name);
  Json info = manifest(0);
  info["memory_bytes"] = host.memory;
  info["gpus"] = gpus();
  info["gpu_engine"] = info["versions"]["build"]["gpu engine"];
  info["known_devices"] = known;
  if (o.json) print_json(info);
  else fmt::print("{}", text_of(info));
  return 0;
}

}  // namespace

void add_info(CLI::App& app, Action& action) {
  std::shared_ptr<Options> o;
  add_verb(app, action, "info", "Say what this machine and this build have", "tessera info", perform, o);
}

}  // namespace tessera::tools
