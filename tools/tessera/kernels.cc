// tessera kernels: what this build ships for GPUs; building and taking apart the pack.
#include "verb.h"

namespace tessera::tools {
namespace {

struct Options {
  bool json = false;
  std::string build, targets, nvrtc, dump;
};

std::vector<tessera_kernel_facts> list() {
  tessera_error error = fresh_error();
  int32_t count = 0;
  call(tessera_kernels_list(nullptr, 0, &count, &error), error);
  std::vector<tessera_kernel_facts> all(static_cast<size_t>(count));
  for (tessera_kernel_facts& facts : all) facts.size = sizeof facts;
  call(tessera_kernels_list(all.data(), count, &count, &error), error);
  return all;
}

int perform(const Options& o) {
  tessera_error error = fresh_error();
  const auto given = [](const std::string& text) { return text.empty() ? nullptr : text.c_str(); };
  if (!o.build.empty()) call(tessera_kernels_build(o.build.c_str(), given(o.targets), given(o.nvrtc), &error), error);
  if (!o.dump.empty()) call(tessera_kernels_dump(o.dump.c_str(), &error), error);
  if (!o.build.empty() || !o.dump.empty()) {
    if (o.json) print_json({{"built", o.build}, {"dumped", o.dump}});
    return TESSERA_OK;
  }
  Json rows = Json::array();
  std::string table = fmt::format("{:<86}{:<13}{:>5}{:>8}{:>9}{:>9}  {}\n", "kernel", "target", "regs", "spills",
                                  "shared", "code", "origin");
  for (const tessera_kernel_facts& k : list()) {
    rows.push_back({{"kernel", k.spec},
                    {"target", k.target},
                    {"registers", k.registers},
                    {"spill_bytes", k.spill_bytes},
                    {"threads", k.threads},
                    {"shared_bytes", k.shared_bytes},
                    {"code_bytes", k.code_bytes},
                    {"origin", k.origin}});
    table += fmt::format("{:<86}{:<13}{:>5}{:>8}{:>9}{:>9}  {}\n", k.spec, k.target, k.registers, k.spill_bytes,
                         k.shared_bytes, k.code_bytes, k.origin);
  }
  if (o.json) print_json({{"kernels", rows}});
  else fmt::print("{}", table);
  return TESSERA_OK;
}

}  // namespace

void add_kernels(CLI::App& app, Action& action) {
  std::shared_ptr<Options> o;
  CLI::App* verb = add_verb(app, action, "kernels", "List the GPU kernels that this build ships, or build or dump them",
                            "tessera kernels\n  tessera kernels build tessera.pack --targets sm_90", perform, o);
  verb->require_subcommand(0, 1);
  CLI::App* build = verb->add_subcommand("build", "Compile all of them into a pack with NVRTC; needs no GPU");
  build->add_option("FILE", o->build, "the pack; the library reads tessera.pack beside itself")->required();
  build->add_option("--targets", o->targets, "such as sm_80,sm_90,compute_80; all that ship if not given");
  build->add_option("--nvrtc", o->nvrtc, "NVRTC's library; the one that is found if not given");
  CLI::App* dump = verb->add_subcommand("dump", "Write each kernel's machine code as a file, for profilers");
  dump->add_option("FOLDER", o->dump, "where")->required();
}

}  // namespace tessera::tools
