// A plan: which kernel answers the problem, how, what it takes, and why the others do not. Pure host work.
#pragma once
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/device.h"
#include "core/operand.h"
#include "core/sequence.h"

namespace tessera::core {

using Hints = tessera_hints;
struct Plan;

// One way to answer problems. An engine is an ordered list of these; engines never see each other.
struct Kernel {
  const char* name;    // "cpu.avx512"
  const char* engine;  // "cpu"
  bool automatic;      // false: only if hints name it
  double least_flops;  // with less work it leaves the problem to the next that accepts, unless hints name kernels
  std::string (*refuse)(const Problem&, const Device&);  // a sentence, or nothing if it can answer
  void (*fill)(Plan&, const Hints&);                     // tiles, steps, workspace
  void (*run)(const Plan&, const Bindings&, void* stream);
  // Joining partial results, for cascades.
  int64_t (*merge_bytes)(const tessera_merge&);
  void (*merge)(const tessera_merge&, std::byte* workspace);
};

// Of a GPU kernel. `code` is the engine's own: which kernel of which spec.
struct Launch {
  const void* code = nullptr;
  int64_t blocks = 0;
  int threads = 0, shared_bytes = 0;
  int cluster = 1;                       // blocks that run at the same time and can meet
  std::shared_ptr<const void> cut = {};  // the engine's own: how the work is cut into blocks
};
struct Step {
  std::string name;  // "attend"
  std::string text;  // how, in words
  Launch launch = {};
};
struct Region {  // of the workspace
  std::string name;
  int64_t offset, bytes;
};
struct Reason {
  std::string kernel, why;
};
struct Cost {
  int64_t bytes_read = 0, bytes_written = 0, score_bytes = 0;
  double flops = 0, seconds = 0;
};

struct Plan {
  Problem problem = {};
  Device device = {};
  const Kernel* kernel = nullptr;
  int threads = 1;
  int tile_rows = 0, tile_keys = 0;
  int64_t sample_pairs = 0;
  std::vector<Step> steps;
  std::vector<Region> regions;
  int64_t workspace_bytes = 0;
  Cost cost;
  std::vector<Reason> reasons;  // kernels not chosen
  std::vector<Plan> levels;     // of a cascade (core/cascade.h); else none
};

// Appends a region, aligned to 64 bytes, and returns its offset.
int64_t add_region(Plan& plan, const char* name, int64_t bytes);
int64_t region_offset(const Plan& plan, const char* name);

Cost cost(const Problem& p, const Device& device);
// (query, key) pairs of one head that the mask's bands keep in a sequence as long as can be. Long sequences are counted
// on evenly spread rows: exact for bands that are straight lines, as all are but chunk's.
double kept_pairs(const Problem& p);

// Checks the problem and takes the first kernel in the list that accepts it and that the hints allow. If none: throws
// Error(TESSERA_UNSUPPORTED) with every kernel's reason.
Plan choose(std::span<const Kernel* const> kernels, const Problem& p, const Device& device, const Hints& hints);

std::string to_text(const Plan& plan);
std::string threads_text(int threads);  // "1 thread", "2 threads"

// Every present operand is bound, and stands at a multiple of its element.
void check_pointers(const Problem& p, const Bindings& bound);
void check_workspace(const Plan& plan, const Bindings& bound);
// What every run must have before a kernel may touch anything: that, workspace, and on a CPU sound lengths.
void check_bindings(const Plan& plan, const Bindings& bound);

}  // namespace tessera::core
