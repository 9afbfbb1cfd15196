#include "bind.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "status.h"

namespace tessera::tools {
namespace {

const char* file_dtype(int32_t dtype) {
  constexpr std::array names{"", "F64", "F32", "BF16", "F16", "I32", "BOOL", "F8_E4M3"};
  return names[static_cast<size_t>(dtype)];
}

// The operand's dimensions that a file has, in the file's order. Operands are (batch, sequence, head, dim).
std::vector<size_t> file_dims(const tessera_problem& problem, int name, size_t rank) {
  const bool packed_q = packed(problem, Side::query), packed_k = packed(problem, Side::key);
  switch (name) {
    case TESSERA_K:
    case TESSERA_V:
    case TESSERA_DK:
    case TESSERA_DV:
      return packed_k ? std::vector<size_t>{1, 2, 3} : std::vector<size_t>{0, 1, 2, 3};
    case TESSERA_Q:
    case TESSERA_OUT:
    case TESSERA_DOUT:
    case TESSERA_DQ:
      return packed_q ? std::vector<size_t>{1, 2, 3} : std::vector<size_t>{0, 1, 2, 3};
    case TESSERA_LSE:
    case TESSERA_MAX_SCORE:
    case TESSERA_DLSE:
      return packed_q ? std::vector<size_t>{2, 1} : std::vector<size_t>{0, 2, 1};
    case TESSERA_K_NEW:
    case TESSERA_V_NEW:
      return packed(problem, Side::fresh) ? std::vector<size_t>{1, 2, 3} : std::vector<size_t>{0, 1, 2, 3};
    case TESSERA_PAGE_TABLE:
      return {0, 1};
    case TESSERA_COS:
    case TESSERA_SIN:
      return {1, 3};
    case TESSERA_K_SCALE:
    case TESSERA_V_SCALE: {  // dimensions that all share are left out: [1], [Hkv], [planes, rows] or all three
      const tessera_operand& o = problem.operand[name];
      if (o.extent[0] == 1 && o.extent[1] == 1) return {2};
      return o.extent[2] == 1 ? std::vector<size_t>{0, 1} : std::vector<size_t>{0, 1, 2};
    }
    case TESSERA_DOCUMENTS_Q:
      return packed_q ? std::vector<size_t>{1} : std::vector<size_t>{0, 1};
    case TESSERA_DOCUMENTS_K:
      return packed_k ? std::vector<size_t>{1} : std::vector<size_t>{0, 1};
    case TESSERA_EXCLUDE_KEYS:
      return {0, 1};  // counts inside a sequence, packed or not
    case TESSERA_SLOPES:
    case TESSERA_DSLOPES:
      // One set of slopes for all batches has one dimension, or two with the first 1.
      return rank == 2 || problem.operand[name].extent[0] != 1 ? std::vector<size_t>{0, 2} : std::vector<size_t>{2};
    case TESSERA_SINKS:
    case TESSERA_DSINKS:
      return {2};
    case TESSERA_BIAS:
    case TESSERA_DBIAS:
    case TESSERA_KEEP:
      return {0, 1, 2, 3};
    default:
      return {0};  // lengths and offsets of sequences
  }
}

std::vector<int64_t> file_shape(const tessera_operand& operand, const std::vector<size_t>& dims) {
  std::vector<int64_t> shape;
  for (const size_t d : dims) shape.push_back(operand.extent[d]);
  return shape;
}

// Calls `copy(element, n)` for each element in the file's order.
template <class Copy>
void in_file_order(const Case& c, int name, const std::vector<size_t>& dims, Copy copy) {
  Index order_extent{1, 1, 1, 1};
  for (size_t n = 0; n < dims.size(); ++n) order_extent[n] = c.operand(name).extent[dims[n]];
  size_t n = 0;
  for_each_index(order_extent, [&](const Index& i) {
    Index index{};
    for (size_t d = 0; d < dims.size(); ++d) index[dims[d]] = i[d];
    copy(c.at(name, index), n++);
  });
}

bool is_lengths(int name) {
  return (name >= TESSERA_CU_SEQLENS_Q && name <= TESSERA_CORNER_OFFSETS) ||
         (name >= TESSERA_CU_SEQLENS_NEW && name <= TESSERA_PAGE_TABLE);
}

void bind_tensor(Case& c, int name, const TensorFiles& files) {
  tools::bind_tensor(c, name, files.with(tessera_name_text(name)));
}

void bind_lengths(Case& c, const TensorFiles& files) {
  for (int name = 0; name < TESSERA_NAMES; ++name) {
    const std::vector<int32_t>& given = c.given(name);
    if (!is_lengths(name) || !c.has(name)) continue;
    if (given.empty() || files.has(tessera_name_text(name))) {
      bind_tensor(c, name, files);
      continue;
    }
    const int64_t columns = c.operand(name).extent[1];  // a page table's
    for (int64_t n = 0; n < static_cast<int64_t>(given.size()); ++n)
      std::memcpy(c.at(name, {n / columns, n % columns, 0, 0}), &given[static_cast<size_t>(n)], sizeof(int32_t));
  }
}

}  // namespace

void bind_tensor(Case& c, int name, const TensorFile& file) {
  bind_tensor(c, name, file, tessera_name_text(name));
}

void bind_tensor(Case& c, int name, const TensorFile& file, const std::string& text) {
  const FileTensor& tensor = file.at(text);
  const tessera_operand& operand = c.operand(name);
  if (tensor.dtype != file_dtype(operand.dtype))
    throw invalid("{}: tensor {}: dtype is {}; the line asks for {} ({}); convert it, or change the line", file.path(),
                  text, tensor.dtype, tessera_dtype_text(operand.dtype), file_dtype(operand.dtype));
  const std::vector<size_t> dims = file_dims(c.problem(), name, tensor.shape.size());
  const std::vector<int64_t> shape = file_shape(operand, dims);
  if (tensor.shape != shape)
    throw invalid("{}: tensor {}: shape is {}; the line asks for {}; change one of them", file.path(), text,
                  shape_text(tensor.shape), shape_text(shape));

  const std::vector<std::byte> bytes = file.read(text);
  const size_t size = tessera_dtype_bytes(operand.dtype);
  if (operand.dtype == TESSERA_BOOL)
    for (const std::byte value : bytes)
      if (value > std::byte{1})
        throw invalid("{}: tensor {}: has a value of {}; a BOOL is 0 or 1; convert it", file.path(), text,
                      static_cast<int>(value));
  in_file_order(c, name, dims,
                [&](std::byte* element, size_t n) { std::memcpy(element, bytes.data() + n * size, size); });
}

TensorFiles::TensorFiles(const std::vector<std::string>& paths) {
  for (const std::string& path : paths) {
    TensorFile file(path);
    for (const auto& [name, tensor] : file.tensors())
      if (has(name))
        throw invalid("tensor {} is in {} and in {}; give it in one of them", name, with(name).path(), path);
    files_.push_back(std::move(file));
  }
}

bool TensorFiles::has(const std::string& name) const {
  return std::any_of(files_.begin(), files_.end(), [&](const TensorFile& file) { return file.has(name); });
}

const TensorFile& TensorFiles::with(const std::string& name) const {
  const auto has_it = [&](const TensorFile& file) { return file.has(name); };
  const auto found = std::find_if(files_.begin(), files_.end(), has_it);
  if (found != files_.end()) return *found;
  if (files_.size() > 1) throw invalid("{}: tensor {} is in none of them; add it to one", paths(), name);
  return files_.front();  // whose own message lists what it has
}

std::string TensorFiles::paths() const {
  std::string all;
  for (const TensorFile& file : files_) all += (all.empty() ? "" : ", ") + file.path();
  return all;
}

void bind_files(Case& c, const TensorFiles& files) {
  const bool backward = c.problem().pass == TESSERA_BACKWARD;
  for (const int name : {TESSERA_OUT, TESSERA_LSE})
    if (backward && !files.has(tessera_name_text(name)))
      throw invalid(
          "{}: tensor {} is missing; backward reads the out and lse of forward: run the forward line first with "
          "--out fwd.safetensors, then give --in {} --in fwd.safetensors",
          files.paths(), tessera_name_text(name), files.with("q").path());
  bind_lengths(c, files);
  const std::vector<int> results = outputs(c.problem());
  for (int name = 0; name < TESSERA_NAMES; ++name)
    if (c.has(name) && !is_lengths(name) && name != TESSERA_STATUS &&
        std::find(results.begin(), results.end(), name) == results.end())
      bind_tensor(c, name, files);
}

std::string unused_inputs(const Case& c, const TensorFiles& files) {
  std::string notes;
  for (int name = 0; name < TESSERA_NAMES; ++name) {
    const std::string text = tessera_name_text(name);
    const bool input = name < TESSERA_OUT || (name == TESSERA_DLSE && c.problem().pass == TESSERA_BACKWARD);
    if (input && !c.has(name) && files.has(text))
      notes += fmt::format("tessera: note: {} is in the file {}, but the line does not use it\n", text,
                           files.with(text).path());
  }
  return notes;
}

void bind_mask(Case& c, const TensorFiles& files) {
  bind_lengths(c, files);
  for (const int name : {TESSERA_KEEP, TESSERA_EXCLUDE_KEYS, TESSERA_DOCUMENTS_Q, TESSERA_DOCUMENTS_K})
    if (c.has(name)) bind_tensor(c, name, files);
}

std::vector<OwnedTensor> to_tensors(const Case& c, const std::vector<int>& names) {
  std::vector<OwnedTensor> tensors;
  for (const int name : names) {
    const tessera_operand& operand = c.operand(name);
    const std::vector<size_t> dims = file_dims(c.problem(), name, 0);
    OwnedTensor tensor{result_text(c.problem(), name), file_dtype(operand.dtype), file_shape(operand, dims), {}};
    const size_t size = tessera_dtype_bytes(operand.dtype);
    in_file_order(c, name, dims, [&](const std::byte* element, size_t) {
      tensor.bytes.insert(tensor.bytes.end(), element, element + size);
    });
    tensors.push_back(std::move(tensor));
  }
  return tensors;
}

}  // namespace tessera::tools
