// The C interface: structs in and out at the caller's size, exceptions into codes, nothing else.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <vector>

#include "api/plan_cache.h"
#include "core/cascade.h"
#include "core/check.h"
#include "core/element_mask.h"
#include "core/error.h"
#include "core/line.h"
#include "core/plan.h"
#include "cpu/cpu.h"
#include "cuda/cuda.h"
#include "reference/reference.h"
#include "rules/dtype.h"
#include "rules/philox.h"

using namespace tessera;
using core::require;

struct tessera_line {
  core::Line line;
};
struct tessera_plan {
  std::shared_ptr<const api::MadePlan> made;
  const core::Plan& plan = made->plan;
  const std::vector<std::string>& steps = made->steps;
};

namespace {

// The order in which kernels are offered a problem: the fastest first.
std::span<const core::Kernel* const> all_kernels() {
  static const std::vector<const core::Kernel*> list = [] {
    std::vector<const core::Kernel*> kernels;
    for (const auto engine : {cuda::kernels(), cpu::kernels(), reference::kernels()})
      kernels.insert(kernels.end(), engine.begin(), engine.end());
    return kernels;
  }();
  return list;
}

// -------------------------------------------------------------------------------------------------------- errors

// Writes as much as the caller's struct holds, and no half of a UTF-8 character.
int32_t report(tessera_error* error, int32_t code, const char* message) noexcept {
  if (!error) return code;
  const size_t size = std::min(error->size, sizeof *error);
  if (size >= offsetof(tessera_error, message)) error->code = code;
  if (size <= offsetof(tessera_error, message)) return code;
  const size_t room = size - offsetof(tessera_error, message) - 1;
  size_t length = std::strlen(message);
  if (length > room) {
    length = room;
    while (length > 0 && (message[length] & 0xC0) == 0x80) --length;
  }
  std::memcpy(error->message, message, length);
  error->message[length] = 0;
  return code;
}

// Nothing that is thrown crosses the C interface.
template <class Work>
int32_t guarded(tessera_error* error, Work&& work) noexcept {
  try {
    work();
    return report(error, TESSERA_OK, "");
  } catch (const core::Error& e) {
    return report(error, e.code, e.what());
  } catch (const std::bad_alloc&) {
    return report(error, TESSERA_FAILED, "the machine has no memory left for this call.");
  } catch (const std::exception& e) {
    return report(error, TESSERA_FAILED, e.what());
  } catch (...) {
    return report(error, TESSERA_FAILED, "an exception that says nothing of itself.");
  }
}

void require_given(const void* pointer, const char* what) {
  require(pointer, "{} is NULL; it must be given.", what);
}

// ------------------------------------------------------------------------------------------------- sized structs

// How a struct is called in messages, and the fields that every caller's must have.
template <class T>
struct Sized;
template <>
struct Sized<tessera_problem> {
  static constexpr const char* text = "problem";
  static constexpr size_t least = offsetof(tessera_problem, operand);
};
template <>
struct Sized<tessera_bindings> {
  static constexpr const char* text = "bindings";
  static constexpr size_t least = offsetof(tessera_bindings, workspace);
};
template <>
struct Sized<tessera_device> {
  static constexpr const char* text = "device";
  static constexpr size_t least = offsetof(tessera_device, shared_per_block);
};
template <>
struct Sized<tessera_hints> {
  static constexpr const char* text = "hints";
  static constexpr size_t least = offsetof(tessera_hints, threads);
};
template <>
struct Sized<tessera_plan_facts> {
  static constexpr const char* text = "facts";
  static constexpr size_t least = offsetof(tessera_plan_facts, threads);
};
template <>
struct Sized<tessera_verdict> {
  static constexpr const char* text = "verdicts[0]";
  static constexpr size_t least = offsetof(tessera_verdict, elements);
};
template <>
struct Sized<tessera_kernel_facts> {
  static constexpr const char* text = "kernels[0]";
  static constexpr size_t least = offsetof(tessera_kernel_facts, registers);
};
template <>
struct Sized<tessera_merge> {
  static constexpr const char* text = "merge";
  static constexpr size_t least = offsetof(tessera_merge, part_out_data);
};

constexpr size_t largest_struct = size_t{1} << 16;  // a size past it was never set, and nothing may be read by it

// Sizes are multiples of 8, as those of all these structs are, so that no field is ever cut in two.
template <class T>
void check_size(const T* given) {
  static_assert(sizeof(T) % 8 == 0);
  require_given(given, Sized<T>::text);
  require(
      given->size >= Sized<T>::least && given->size % 8 == 0 && given->size <= largest_struct,
      "{0}.size is {1}; it must be a multiple of 8 from {2} to {3}. Set it to sizeof, or begin with the init function.",
      Sized<T>::text, given->size, Sized<T>::least, largest_struct);
}

// The caller's struct over `ours`, which holds the defaults. What a newer caller says beyond our size must be nothing.
template <class T>
T read(const T* given, T ours) {
  check_size(given);
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  const bool understood =
      std::all_of(bytes + std::min(given->size, sizeof(T)), bytes + given->size, [](auto b) { return b == 0; });
  require(understood, "{}.size is {} and this library knows {}; what lies beyond is not zero. Use a newer library.",
          Sized<T>::text, given->size, sizeof(T));
  std::memcpy(&ours, given, std::min(given->size, sizeof(T)));
  ours.size = sizeof(T);
  return ours;
}

// `ours` into the caller's struct as far as that goes; its size stays.
template <class T>
void write(T* given, const T& ours) {
  constexpr size_t after = sizeof ours.size;
  std::memcpy(reinterpret_cast<char*>(given) + after, reinterpret_cast<const char*>(&ours) + after,
              std::min(given->size, sizeof(T)) - after);
}

// The caller's array lies as its header says: elements as far apart as the size of its first.
template <class T>
void write_at(T* given, int32_t index, const T& ours) {
  const size_t step = given->size;
  auto* const place = reinterpret_cast<T*>(reinterpret_cast<char*>(given) + step * static_cast<size_t>(index));
  place->size = step;
  write(place, ours);
}

template <class T>
T initial() {
  T t = {};
  t.size = sizeof t;
  return t;
}

core::Problem read_problem(const tessera_problem* problem) {
  return read(problem, initial<tessera_problem>());
}
core::Bindings read_bindings(const tessera_bindings* bindings) {
  return read(bindings, initial<tessera_bindings>());
}

core::Device read_device(const tessera_device* device) {
  core::Device d = read(device, initial<tessera_device>());
  require(d.kind == TESSERA_CPU || d.kind == TESSERA_GPU, "device.kind is {}; it must be CPU (0) or GPU (1).", d.kind);
  require(d.isa >= TESSERA_ISA_BASELINE && d.isa <= TESSERA_ISA_AVX512BF16,
          "device.isa is {}; it must be a tessera_isa (0 to 3).", d.isa);
  require(d.threads >= 0, "device.threads is {}; it must be at least 0.", d.threads);
  d.name[sizeof d.name - 1] = 0;
  return d;
}

core::Hints read_hints(const tessera_hints* hints) {
  return hints ? read(hints, initial<tessera_hints>()) : initial<tessera_hints>();
}

std::shared_ptr<const api::MadePlan> made_of(core::Plan plan) {
  auto made = std::make_shared<api::MadePlan>();
  made->plan = std::move(plan);
  for (const core::Step& step : made->plan.steps) made->steps.push_back(step.name + ": " + step.text);
  return made;
}

void check_runs_here(const tessera_plan* plan, const void* stream) {
  require_given(plan, "plan");
  static const core::Device host = core::find_device("host");
  const core::Device& device = plan->plan.device;
  if (device.kind == TESSERA_GPU) return;  // its run checks the device itself
  require(device.isa <= host.isa,
          "the plan was made for device {} with {}; this processor has {}. Make it for device \"host\".", device.name,
          core::isa_text(device.isa), core::isa_text(host.isa));
  require(!stream, "stream is {}; a plan for a CPU runs in the calling thread. Pass NULL.", fmt::ptr(stream));
}

// Runs `work`; what a device would have noted goes into the status words besides the error.
template <class Work>
void noting_status(std::span<const core::Plan> plans, std::span<const core::Bindings> bound, Work&& work) {
  try {
    work();
  } catch (const core::Error& e) {
    for (size_t n = 0; e.status != TESSERA_STATUS_SOUND && n < bound.size(); ++n)
      if (core::has(plans[n].problem, TESSERA_STATUS))
        *static_cast<int32_t*>(bound[n].data[TESSERA_STATUS]) |= e.status;
    throw;
  }
}

// Texts for a buffer of the caller's: cut to its capacity; returns what the whole needs with its zero.
size_t put(const std::string& text, char* buffer, size_t capacity) {
  if (buffer && capacity > 0) {
    const size_t length = std::min(text.size(), capacity - 1);
    std::memcpy(buffer, text.data(), length);
    buffer[length] = 0;
  }
  return text.size() + 1;
}
// What cannot be said in words is said by an empty text.
template <class Text>
size_t put_text(char* buffer, size_t capacity, Text&& text) noexcept {
  try {
    return put(text(), buffer, capacity);
  } catch (...) {
    if (buffer && capacity > 0) *buffer = 0;
    return 1;
  }
}

// ----------------------------------------------------------------------------------------------------- declaring

void check_name(int32_t name) {
  require(name >= 0 && name < TESSERA_NAMES, "name is {}; it must be a tessera_name (0 to {}).", name,
          TESSERA_NAMES - 1);
}

// Extents are products of sizes; they must be sound before anything is multiplied.
void check_declaration(const core::Problem& p, int32_t dtype, int32_t layout) {
  require(dtype > TESSERA_ABSENT && dtype < rules::dtype_count, "dtype is {}; it must be a tessera_dtype (1 to {}).",
          dtype, rules::dtype_count - 1);
  require(layout >= TESSERA_BSHD && layout <= TESSERA_KV, "layout is {}; it must be a tessera_layout (0 to 3).",
          layout);
  for (const int64_t n :
       {p.batch, p.heads_q, p.heads_kv, p.len_q, p.len_k, p.dim, p.dim_v, p.rows_q, p.rows_k, p.len_new, p.rows_new})
    require(n >= 0 && n <= INT32_MAX, "a size of the problem is {}; sizes are from 0 to 2^31 - 1.", n);
}

// The caller's problem, changed by `change`, goes back as far as the caller's struct goes.
template <class Change>
void change_problem(tessera_problem* problem, Change&& change) {
  core::Problem p = read_problem(problem);
  change(p);
  const auto* ours = reinterpret_cast<const unsigned char*>(&p);
  require(std::all_of(ours + std::min(problem->size, sizeof p), ours + sizeof p, [](auto b) { return b == 0; }),
          "problem.size is {}; the operand lies beyond it. Set it to sizeof, or begin with tessera_problem_init.",
          problem->size);
  write(problem, p);
}

// ---------------------------------------------------------------------------------------------------------- tools

void check_pair(const core::Problem& p, int64_t batch, int64_t head) {
  require(batch >= 0 && batch < p.batch, "batch is {}; the problem has {}.", batch, p.batch);
  require(head >= 0 && head < p.heads_q, "head is {}; the problem has {} query heads.", head, p.heads_q);
}

void fill_mask(const core::Problem& p, const core::Bindings& bound, int64_t batch, int64_t head, uint8_t* grid) {
  const core::Sequence s = core::sequence(p, bound, batch);
  const rules::BandMask band = core::band_mask(p, s);
  std::fill_n(grid, p.len_q * p.len_k, uint8_t{0});
  for (int64_t i = 0; i < s.q.used; ++i)
    for (int64_t j = 0; j < s.k.used; ++j) grid[i * p.len_k + j] = core::keeps(p, bound, s, band, head, i, j);
}

std::string build_info() {
  std::string text;
  const auto fact = [&](const char* key, const std::string& value) { text += fmt::format("{}\t{}\n", key, value); };
#if defined(__clang__)
  fact("compiler", "clang " __clang_version__);
#else
  fact("compiler", "g++ " __VERSION__);
#endif
  std::string build = "optimised";
#if !defined(__OPTIMIZE__)
  build = "not optimised";
#endif
#if !defined(NDEBUG)
  build += ", with assertions";
#endif
  fact("build", build);
  fact("OpenMP", std::to_string(_OPENMP));
  std::string kernels;
  for (const core::Kernel* k : all_kernels()) kernels += (kernels.empty() ? "" : ", ") + std::string(k->name);
  fact("kernels", kernels);
  fact("gpu engine", cuda::status());
  return text;
}

}  // namespace

// ------------------------------------------------------------------------------------------- the functions, in order

const char* tessera_name_text(int32_t name) {
  return name >= 0 && name < TESSERA_NAMES ? core::operand_row(name).text : nullptr;
}
size_t tessera_dtype_bytes(int32_t dtype) {
  return dtype >= 0 && dtype < rules::dtype_count ? static_cast<size_t>(rules::dtype_rows[dtype].bytes) : 0;
}
const char* tessera_dtype_text(int32_t dtype) {
  return dtype >= 0 && dtype < rules::dtype_count ? rules::dtype_rows[dtype].text : nullptr;
}

void tessera_problem_init(tessera_problem* problem) {
  if (problem) *problem = initial<tessera_problem>();
}
int32_t tessera_declare(tessera_problem* problem, int32_t name, int32_t dtype, int32_t layout, tessera_error* error) {
  return guarded(error, [&] {
    check_name(name);
    change_problem(problem, [&](core::Problem& p) {
      check_declaration(p, dtype, layout);
      core::declare(p, name, dtype, layout);
    });
  });
}
int32_t tessera_declare_all(tessera_problem* problem, int32_t dtype, int32_t layout, tessera_error* error) {
  return guarded(error, [&] {
    change_problem(problem, [&](core::Problem& p) {
      check_declaration(p, dtype, layout);
      require(dtype <= TESSERA_F16, "dtype is {}; that of q, k and v must be f64, f32, bf16 or f16.",
              rules::dtype_rows[dtype].text);
      require(p.heads_q > 0 && p.heads_kv > 0 && p.dim > 0 && p.dim_v > 0,
              "heads are {}/{} and dims {}/{}; extents are made of them. Set all sizes before operands are declared.",
              p.heads_q, p.heads_kv, p.dim, p.dim_v);
      core::declare_all(p, dtype, layout);
    });
  });
}
int32_t tessera_check(const tessera_problem* problem, tessera_error* error) {
  return guarded(error, [&] { core::check(read_problem(problem)); });
}

int32_t tessera_line_parse(const char* text, tessera_line** line, tessera_error* error) {
  if (line) *line = nullptr;
  return guarded(error, [&] {
    require_given(text, "text");
    require_given(line, "line");
    *line = new tessera_line{core::parse(text)};
  });
}
void tessera_line_free(tessera_line* line) {
  delete line;
}
const tessera_problem* tessera_line_problem(const tessera_line* line) {
  return line ? &line->line.problem : nullptr;
}
const int32_t* tessera_line_values(const tessera_line* line, int32_t name, int64_t* count) {
  if (count) *count = 0;
  if (!line) return nullptr;
  const auto found = line->line.values.find(name);
  if (found == line->line.values.end()) return nullptr;
  if (count) *count = static_cast<int64_t>(found->second.size());
  return found->second.data();
}
uint64_t tessera_line_seed(const tessera_line* line) {
  return line ? line->line.seed : 0;
}
uint64_t tessera_line_offset(const tessera_line* line) {
  return line ? line->line.offset : 0;
}
size_t tessera_line_print(const tessera_line* line, char* buffer, size_t capacity) {
  return put_text(buffer, capacity, [&] { return line ? core::print(line->line) : std::string(); });
}
size_t tessera_problem_print(const tessera_problem* problem, char* buffer, size_t capacity) {
  return put_text(buffer, capacity, [&] {
    const core::Problem p = read_problem(problem);
    core::check(p);
    return core::print(p);
  });
}

int32_t tessera_device_find(const char* name, tessera_device* device, tessera_error* error) {
  return guarded(error, [&] {
    require_given(name, "name");
    check_size(device);
    write(device, cuda::is_name_of_gpu(name) ? cuda::find_device(name) : core::find_device(name));
  });
}
const char* tessera_device_known(int32_t index) {
  return core::known_device(index);
}

void tessera_hints_init(tessera_hints* hints) {
  if (hints) *hints = initial<tessera_hints>();
}
int32_t tessera_plan_make(const tessera_problem* problem, const tessera_device* device, const tessera_hints* hints,
                          tessera_plan** plan, tessera_error* error) {
  if (plan) *plan = nullptr;
  return guarded(error, [&] {
    require_given(plan, "plan");
    static api::PlanCache& cache = *new api::PlanCache;  // threads may plan while the process ends
    const core::Problem p = read_problem(problem);
    const core::Device d = read_device(device);
    const core::Hints h = read_hints(hints);
    *plan = new tessera_plan{cache.get(p, d, h, [&] { return made_of(core::choose(all_kernels(), p, d, h)); })};
  });
}
int32_t tessera_cascade_make(const tessera_problem* const* levels, int32_t count, const tessera_device* device,
                             const tessera_hints* hints, tessera_plan** plan, tessera_error* error) {
  if (plan) *plan = nullptr;
  return guarded(error, [&] {
    require_given(plan, "plan");
    require(count >= 1 && count <= static_cast<int32_t>(core::most_levels),
            "count is {}; a cascade has 1 to {} levels.", count, core::most_levels);
    std::vector<core::Problem> problems;
    for (int32_t n = 0; n < count; ++n) problems.push_back(read_problem(levels[n]));
    *plan = new tessera_plan{
        made_of(core::choose_cascade(all_kernels(), problems, read_device(device), read_hints(hints)))};
  });
}
void tessera_plan_free(tessera_plan* plan) {
  delete plan;
}
int32_t tessera_plan_get(const tessera_plan* plan, tessera_plan_facts* facts, tessera_error* error) {
  return guarded(error, [&] {
    require_given(plan, "plan");
    check_size(facts);
    const core::Plan& p = plan->plan;
    write(facts, {.size = facts->size,
                  .engine = p.kernel->engine,
                  .kernel = p.kernel->name,
                  .device = p.device.name,
                  .threads = p.threads,
                  .tile_rows = p.tile_rows,
                  .tile_keys = p.tile_keys,
                  .steps = static_cast<int32_t>(p.steps.size()),
                  .reasons = static_cast<int32_t>(p.reasons.size()),
                  .reserved = 0,
                  .workspace_bytes = p.workspace_bytes,
                  .bytes_read = p.cost.bytes_read,
                  .bytes_written = p.cost.bytes_written,
                  .score_bytes_avoided = p.cost.score_bytes,
                  .flops = p.cost.flops,
                  .roofline_seconds = p.cost.seconds});
  });
}
const char* tessera_plan_step(const tessera_plan* plan, int32_t index) {
  const bool there = plan && index >= 0 && static_cast<size_t>(index) < plan->steps.size();
  return there ? plan->steps[static_cast<size_t>(index)].c_str() : nullptr;
}
const char* tessera_plan_reason(const tessera_plan* plan, int32_t index, const char** reason) {
  const bool there = plan && index >= 0 && static_cast<size_t>(index) < plan->plan.reasons.size();
  const core::Reason* r = there ? &plan->plan.reasons[static_cast<size_t>(index)] : nullptr;
  if (reason) *reason = r ? r->why.c_str() : nullptr;
  return r ? r->kernel.c_str() : nullptr;
}
size_t tessera_plan_print(const tessera_plan* plan, char* buffer, size_t capacity) {
  return put_text(buffer, capacity, [&] { return plan ? core::to_text(plan->plan) : std::string(); });
}

void tessera_bindings_init(tessera_bindings* bindings) {
  if (bindings) *bindings = initial<tessera_bindings>();
}
int32_t tessera_run(const tessera_plan* plan, const tessera_bindings* bindings, void* stream, tessera_error* error) {
  return guarded(error, [&] {
    check_runs_here(plan, stream);
    const core::Plan& p = plan->plan;
    require(p.levels.empty(), "the plan is a cascade of {} levels; run it with tessera_cascade_run.", p.levels.size());
    const core::Bindings bound = read_bindings(bindings);
    noting_status(std::span(&p, 1), std::span(&bound, 1), [&] {
      core::check_bindings(p, bound);
      p.kernel->run(p, bound, stream);
    });
  });
}
int32_t tessera_cascade_run(const tessera_plan* plan, const tessera_bindings* const* levels, void* stream,
                            tessera_error* error) {
  return guarded(error, [&] {
    check_runs_here(plan, stream);
    require_given(levels, "levels");
    const core::Plan& p = plan->plan;
    const size_t count = p.levels.size();
    std::array<core::Bindings, core::most_levels> bound;
    for (size_t n = 0; n < count; ++n) bound[n] = read_bindings(levels[n]);
    const std::span all(bound.data(), count);
    noting_status(p.levels, all, [&] { core::run_cascade(p, all, stream); });
  });
}

int32_t tessera_mask_grid(const tessera_problem* problem, const tessera_bindings* bindings, int64_t batch, int64_t head,
                          uint8_t* grid, tessera_error* error) {
  return guarded(error, [&] {
    const core::Problem p = read_problem(problem);
    core::check(p);
    require(p.pass != TESSERA_APPEND, "the pass is append, which attends nothing; it has no mask.");
    const core::Bindings bound = read_bindings(bindings);
    check_pair(p, batch, head);
    for (int name = 0; name < TESSERA_NAMES; ++name) {
      const core::Kind kind = core::operand_row(name).kind;
      if ((kind != core::Kind::i32 && kind != core::Kind::boolean) || name == TESSERA_STATUS) continue;
      require(!core::has(p, name) || core::span(core::operand(p, name)) == 0 || bound.data[name],
              "{} is bound to NULL; the mask needs it. Bind its first element.", core::operand_row(name).text);
    }
    core::check_lengths(p, bound);
    if (p.len_q == 0 || p.len_k == 0) return;
    require_given(grid, "grid");
    fill_mask(p, bound, batch, head, grid);
  });
}
int32_t tessera_dropout_mask(double dropout, uint64_t seed, uint64_t offset, int64_t batch, int64_t head,
                             int64_t heads_q, int64_t rows, int64_t keys, uint8_t* grid, tessera_error* error) {
  return guarded(error, [&] {
    require(dropout >= 0 && dropout < 1, "dropout is {}; it must be at least 0 and below 1.", dropout);
    require(heads_q >= 1 && heads_q <= INT32_MAX, "heads_q is {}; it must be from 1 to 2^31 - 1.", heads_q);
    require(head >= 0 && head < heads_q, "head is {}; it must be from 0 to heads_q - 1, {}.", head, heads_q - 1);
    require(batch >= 0 && batch < (int64_t{1} << 32) / heads_q,
            "batch is {} with {} heads; dropout counts them in 32 bits.", batch, heads_q);
    require(rows >= 0 && rows <= INT32_MAX && keys >= 0 && keys <= INT32_MAX,
            "the mask is {} x {}; rows and keys are from 0 to 2^31 - 1.", rows, keys);
    if (rows == 0 || keys == 0) return;
    require_given(grid, "grid");
    const auto plane = static_cast<rules::Word>(batch * heads_q + head);
    const rules::Dropout mask = rules::make_dropout(dropout, seed, offset, plane);
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < keys; ++j) grid[i * keys + j] = mask.keeps(i, j);
  });
}

int32_t tessera_verify(const tessera_problem* problem, const tessera_bindings* got, int64_t sample_pairs,
                       tessera_verdict* verdicts, int32_t capacity, int32_t* count, tessera_error* error) {
  if (count) *count = 0;
  return guarded(error, [&] {
    require(capacity >= 0, "capacity is {}; it must be at least 0.", capacity);
    if (capacity > 0) check_size(verdicts);
    const std::vector<tessera_verdict> all = reference::verify(read_problem(problem), read_bindings(got), sample_pairs);
    const auto n = std::min(static_cast<int32_t>(all.size()), capacity);
    for (int32_t i = 0; i < n; ++i) write_at(verdicts, i, all[static_cast<size_t>(i)]);
    if (count) *count = n;
    std::string wrong;
    for (const tessera_verdict& v : all)
      if (!v.ok)
        wrong += fmt::format("{}{}: {}, largest error {:.3g} with bound {:.3g}, RMS {:.3g} with bound {:.3g}",
                             wrong.empty() ? "" : "\n", core::operand_row(v.name).text,
                             v.nonfinite_equal ? "inf and nan in place" : "inf or nan out of place", v.max, v.bound,
                             v.rms, v.bound_rms);
    if (!wrong.empty()) throw core::Error(TESSERA_WRONG, wrong);
  });
}

void tessera_merge_init(tessera_merge* merge) {
  if (merge) *merge = initial<tessera_merge>();
}
int32_t tessera_merge_run(const tessera_merge* merge, tessera_error* error) {
  return guarded(error, [&] {
    const tessera_merge m = read(merge, initial<tessera_merge>());
    cpu::check_merge(m);
    std::vector<std::byte> workspace(static_cast<size_t>(cpu::merge_bytes(m)));
    cpu::merge(m, workspace.data());
  });
}

int32_t tessera_kernels_list(tessera_kernel_facts* kernels, int32_t capacity, int32_t* count, tessera_error* error) {
  if (count) *count = 0;
  return guarded(error, [&] {
    require(capacity >= 0, "capacity is {}; it must be at least 0.", capacity);
    if (capacity > 0) check_size(kernels);
    static const std::vector<cuda::KernelFacts> all = cuda::shipped_kernels();
    const auto n = std::min(static_cast<int32_t>(all.size()), capacity);
    for (int32_t i = 0; i < n; ++i) {
      const cuda::KernelFacts& k = all[static_cast<size_t>(i)];
      write_at(kernels, i,
               {.size = 0,
                .spec = k.spec.c_str(),
                .target = k.target.c_str(),
                .origin = k.origin.c_str(),
                .registers = k.registers,
                .spill_bytes = k.spill_bytes,
                .threads = k.threads,
                .reserved = 0,
                .shared_bytes = k.shared_bytes,
                .code_bytes = k.code_bytes});
    }
    if (count) *count = static_cast<int32_t>(all.size());
  });
}
int32_t tessera_kernels_build(const char* path, const char* targets, const char* nvrtc, tessera_error* error) {
  return guarded(error, [&] {
    require_given(path, "path");
    cuda::build_pack(path, targets ? targets : "", nvrtc ? nvrtc : "");
  });
}
int32_t tessera_kernels_dump(const char* folder, tessera_error* error) {
  return guarded(error, [&] {
    require_given(folder, "folder");
    cuda::dump_pack(folder);
  });
}

#define TESSERA_TEXT_(x) #x
#define TESSERA_TEXT(x) TESSERA_TEXT_(x)
const char* tessera_version(void) {
  return TESSERA_TEXT(TESSERA_VERSION_MAJOR) "." TESSERA_TEXT(TESSERA_VERSION_MINOR) "." TESSERA_TEXT(
      TESSERA_VERSION_PATCH);
}
const char* tessera_build_info(void) {
  try {
    static const std::string text = build_info();
    return text.c_str();
  } catch (...) {
    return "";
  }
}
