// tessera mask: which keys each query keeps.
#include <algorithm>
#include <numeric>
#include <sstream>

#include "bind.h"
#include "files.h"
#include "picture.h"
#include "progress.h"
#include "verb.h"

namespace tessera::tools {
namespace {

struct Options {
  bool json = false;
  std::string line, in, png;
  int64_t batch = 0, head = 0;
  bool counts = false;
};

constexpr int64_t most_cells = 64'000'000;  // to print

// A mask has no head dim; lines have to. Adds one where a person left it out.
std::string with_dim(const std::string& line) {
  const std::string text = line.substr(0, line.find('#'));
  std::istringstream words(text);
  for (std::string word; words >> word;)
    if (word.size() > 1 && word[0] == 'd' && word[1] >= '0' && word[1] <= '9') return text;
  return text + " d1";
}

void bind(Case& c, const Options& o, Progress& progress) {
  if (!o.in.empty()) return bind_mask(c, TensorFiles({o.in}));
  fill_random(c, 0);
  std::string made_up;
  for (int name = TESSERA_KEEP; name <= TESSERA_CORNER_OFFSETS; ++name)
    if (c.has(name) && c.given(name).empty())
      made_up += (made_up.empty() ? "" : ", ") + std::string(tessera_name_text(name));
  if (!made_up.empty())
    progress.print(fmt::format("tessera: note: {}: random, seed 0; give --in FILE for your own\n", made_up), stderr);
}

int perform(const Options& o) {
  const Line line(with_dim(o.line));
  const int64_t rows = line.problem().len_q, keys = line.problem().len_k;
  const double cells = static_cast<double>(rows) * static_cast<double>(keys);
  const bool print_grid = !o.counts && o.png.empty();
  const auto memory = static_cast<double>(find_device("host").memory);
  if (memory > 0 && cells > memory)
    throw failed("the grid has {} x {} cells, a byte each; this machine has {}; use shorter lengths", rows, keys,
                 bytes_text(memory));
  if (print_grid && cells > static_cast<double>(most_cells))
    throw invalid("the grid has {} x {} cells; at most {} are printed; use --counts{}", rows, keys, most_cells,
                  std::max(rows, keys) + 2 > most_side || 2 * cells > memory ? "" : " or --png FILE");
  const auto check_place = [](const char* option, int64_t place, int64_t count) {
    if (place >= count) throw invalid("{} is {}; the line has {}, counted from 0", option, place, count);
  };
  check_place("--batch", o.batch, line.problem().batch);
  check_place("--head", o.head, line.problem().heads_q);
  if (!o.png.empty()) check_writable(o.png, {o.in});
  std::vector<uint8_t> grid;
  {
    Progress progress("filling", 0, !o.json);
    Case c(line, Only::mask);
    bind(c, o, progress);
    try {
      grid.resize(static_cast<size_t>(rows) * static_cast<size_t>(keys));
    } catch (const std::exception&) {  // bad_alloc or length_error
      throw failed("the grid has {} x {} cells, which the machine has no memory for; use shorter lengths", rows, keys);
    }
    progress.label("asking which keys are kept");
    tessera_error error = fresh_error();
    call(tessera_mask_grid(&c.problem(), &c.bindings(), o.batch, o.head, grid.data(), &error), error);
    progress.label("writing");
    if (!o.png.empty()) write_png(o.png, grid, rows, keys);
  }

  const auto row_begin = [&](int64_t row) { return grid.begin() + row * keys; };
  const auto count = [&](int64_t row) { return std::accumulate(row_begin(row), row_begin(row + 1), int64_t{0}); };
  const auto text = [&](int64_t row) {
    std::string cells_text(static_cast<size_t>(keys), '0');
    std::transform(row_begin(row), row_begin(row + 1), cells_text.begin(),
                   [](uint8_t kept) { return kept ? '1' : '0'; });
    return cells_text;
  };
  if (!o.json) {
    for (int64_t row = 0; row < rows; ++row)
      if (o.counts) fmt::print("{}\n", count(row));
      else if (print_grid) fmt::print("{}\n", text(row));
    return 0;
  }
  Json result{{"line", line.text()}, {"batch", o.batch}, {"head", o.head}, {"rows", rows}, {"keys", keys}};
  if (o.counts || print_grid) {
    Json& list = result[o.counts ? "counts" : "grid"] = Json::array();
    for (int64_t row = 0; row < rows; ++row) list.push_back(o.counts ? Json(count(row)) : Json(text(row)));
  }
  if (!o.png.empty()) result["png"] = o.png;
  print_json(result);
  return 0;
}

}  // namespace

void add_mask(CLI::App& app, Action& action) {
  std::shared_ptr<Options> o;
  CLI::App* verb = add_verb(app, action, "mask", "Show which keys each query keeps: a row of 0 and 1 for each query",
                            "tessera mask \"forward f32 q2 k5 mask=causal\"", perform, o);
  verb->add_option("LINE", o->line, "a problem as one line (ADDING.md); the head dim may be left out")->required();
  verb->add_option("--in", o->in,
                   "safetensors file of keep, exclude_keys, documents and lengths; else they are random");
  verb->add_option("--batch", o->batch, "counted from 0")->check(whole<int64_t>());
  verb->add_option("--head", o->head, "query head, counted from 0")->check(whole<int64_t>());
  verb->add_flag("--counts", o->counts, "print the kept keys of each row, a number a line, instead of the grid");
  verb->add_option("--png", o->png, "write the grid as a picture, kept is white, instead of printing it");
}

}  // namespace tessera::tools
