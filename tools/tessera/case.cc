#include "case.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "checked.h"
#include "status.h"

namespace tessera::tools {
namespace {

constexpr std::array mask_operands{
    TESSERA_KEEP,         TESSERA_EXCLUDE_KEYS, TESSERA_DOCUMENTS_Q,     TESSERA_DOCUMENTS_K,    TESSERA_CU_SEQLENS_Q,
    TESSERA_CU_SEQLENS_K, TESSERA_SEQUSED_Q,    TESSERA_SEQUSED_K,       TESSERA_CORNER_OFFSETS, TESSERA_CU_SEQLENS_NEW,
    TESSERA_SEQUSED_NEW,  TESSERA_CACHE_LENS,   TESSERA_CACHE_BATCH_IDX, TESSERA_LEFT_PAD,       TESSERA_PAGE_TABLE};

// Bytes from the operand's first element to its last; tessera_check has bounded strides and spans far below 2^63.
int64_t span_bytes(const tessera_operand& operand) {
  int64_t last = 0;
  for (int n = 0; n < 4; ++n) {
    if (operand.extent[n] == 0) return 0;
    if (operand.extent[n] > 1) last += (operand.extent[n] - 1) * operand.stride[n];
  }
  return (last + 1) * static_cast<int64_t>(tessera_dtype_bytes(operand.dtype));
}

// All bits set: what nobody fills is NaN, true, or -1.
Buffer poisoned(size_t bytes, const tessera_problem& problem) {
  Buffer buffer = allocate(bytes, static_cast<size_t>(problem.alignment > 0 ? problem.alignment : 16));
  std::memset(buffer.memory.get(), 0xFF, bytes);
  return buffer;
}

int64_t machine_bytes() {
  return ::sysconf(_SC_PHYS_PAGES) * ::sysconf(_SC_PAGESIZE);
}

}  // namespace

Line::Line(const std::string& text) {
  tessera_line* line = nullptr;
  tessera_error error = fresh_error();
  call(tessera_line_parse(text.c_str(), &line, &error), error);
  line_.reset(line);
}

std::vector<int32_t> Line::values(int name) const {
  int64_t count = 0;
  const int32_t* values = tessera_line_values(line_.get(), name, &count);
  return {values, values + count};
}

std::string Line::text() const {
  std::string text(tessera_line_print(line_.get(), nullptr, 0), '\0');
  tessera_line_print(line_.get(), text.data(), text.size());
  text.resize(std::strlen(text.c_str()));
  return text;
}

Case::Case(const Line& line, Only only) : problem_(line.problem()) {
  tessera_error error = fresh_error();
  call(tessera_check(&problem_, &error), error);
  tessera_bindings_init(&bindings_);
  bindings_.seed = line.seed();
  bindings_.offset = line.offset();

  std::array<bool, TESSERA_NAMES> wanted{};
  std::optional<int64_t> total = 0;
  for (int name = 0; name < TESSERA_NAMES; ++name) {
    const auto n = static_cast<size_t>(name);
    given_[n] = line.values(name);
    const bool in_mask = std::find(mask_operands.begin(), mask_operands.end(), name) != mask_operands.end();
    const bool in_k = name == TESSERA_V && problem_.cache.v_in_k;
    wanted[n] = operand(name).dtype != TESSERA_ABSENT && (only == Only::everything || in_mask) && !in_k;
    if (wanted[n]) total = checked_add(total, span_bytes(operand(name)));
  }
  if (!total || *total > machine_bytes())
    throw failed("the operands take {} bytes; this machine has {}; make the problem smaller",
                 total ? fmt::to_string(*total) : "more than 2^63", machine_bytes());
  try {
    for (int name = 0; name < TESSERA_NAMES; ++name) {
      const auto n = static_cast<size_t>(name);
      if (!wanted[n]) continue;
      buffers_[n] = poisoned(static_cast<size_t>(span_bytes(operand(name))), problem_);
      bindings_.data[n] = buffers_[n].memory.get();
    }
    share_k();
  } catch (const std::bad_alloc&) {
    throw failed("the operands take {} bytes, which the machine does not give; make the problem smaller", *total);
  }
}

std::byte* Case::at(int name, const Index& index) const {
  const tessera_operand& o = problem_.operand[name];
  const auto size = static_cast<int64_t>(tessera_dtype_bytes(o.dtype));
  return static_cast<std::byte*>(bindings_.data[name]) + offset_of(o, index) * size;
}

int32_t& Case::value(int name, int64_t index) const {
  return *reinterpret_cast<int32_t*>(at(name, {index, 0, 0, 0}));
}

int64_t Case::bytes() const {
  size_t bytes = 0;
  for (const Buffer& buffer : buffers_) bytes += buffer.bytes;
  return static_cast<int64_t>(bytes);
}

Buffer Case::renew(int name) {
  Buffer& buffer = buffers_[static_cast<size_t>(name)];
  Buffer old = std::exchange(buffer, poisoned(buffer.bytes, problem_));
  bindings_.data[name] = buffer.memory.get();
  share_k();
  return old;
}

void Case::share_k() {
  if (problem_.cache.v_in_k) bindings_.data[TESSERA_V] = bindings_.data[TESSERA_K];
}

void Case::wipe(int name) {
  const Buffer& buffer = buffers_[static_cast<size_t>(name)];
  std::memset(buffer.memory.get(), 0xFF, buffer.bytes);
}

std::vector<int> outputs(const tessera_problem& problem) {
  std::vector<int> names;
  for (int name = TESSERA_OUT; name < TESSERA_NAMES; ++name) {
    const bool forward = name <= TESSERA_MAX_SCORE, backward = name >= TESSERA_DQ;
    if (problem.operand[name].dtype != TESSERA_ABSENT && (problem.pass == TESSERA_FORWARD ? forward : backward))
      names.push_back(name);
  }
  return names;
}

std::vector<int> updates(const tessera_problem& problem) {
  if (problem.operand[TESSERA_K_NEW].dtype == TESSERA_ABSENT) return {};
  return problem.cache.v_in_k ? std::vector<int>{TESSERA_K} : std::vector<int>{TESSERA_K, TESSERA_V};
}

std::string result_text(const tessera_problem& problem, int name) {
  const std::vector<int> appended = updates(problem);
  const bool in_cache = std::find(appended.begin(), appended.end(), name) != appended.end();
  return std::string(tessera_name_text(name)) + (in_cache ? "_cache" : "");
}

tessera_problem forward_of(const tessera_problem& problem) {
  tessera_problem forward = problem;
  forward.pass = TESSERA_FORWARD;
  for (int name = TESSERA_MAX_SCORE; name < TESSERA_NAMES; ++name) forward.operand[name] = {};
  return forward;
}

std::vector<Sequence> sequences(const Case& c, Side side) {
  struct Names {
    int cu, seqused;
    int64_t tessera_problem::*length;
  };
  constexpr std::array<Names, 3> names = {{{TESSERA_CU_SEQLENS_Q, TESSERA_SEQUSED_Q, &tessera_problem::len_q},
                                           {TESSERA_CU_SEQLENS_K, TESSERA_SEQUSED_K, &tessera_problem::len_k},
                                           {TESSERA_CU_SEQLENS_NEW, TESSERA_SEQUSED_NEW, &tessera_problem::len_new}}};
  const auto [cu, seqused, length] = names[static_cast<size_t>(side)];
  std::vector<Sequence> all;
  for (int64_t b = 0; b < c.problem().batch; ++b) {
    Sequence s{b, 0, c.problem().*length, 0};
    if (c.has(cu)) s = {0, c.value(cu, b), c.value(cu, b + 1) - c.value(cu, b), 0};
    s.used = c.has(seqused) ? std::min<int64_t>(s.length, c.value(seqused, b)) : s.length;
    all.push_back(s);
  }
  return all;
}

}  // namespace tessera::tools
