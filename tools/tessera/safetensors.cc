#include "safetensors.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <set>

#include "checked.h"
#include "files.h"
#include "status.h"

namespace tessera::tools {
namespace {

using Json = nlohmann::ordered_json;

constexpr int64_t header_limit = 100'000'000;  // as the format's own reader has it

constexpr std::array<std::pair<const char*, int64_t>, 14> dtypes{{{"F64", 8},
                                                                  {"F32", 4},
                                                                  {"F16", 2},
                                                                  {"BF16", 2},
                                                                  {"I64", 8},
                                                                  {"I32", 4},
                                                                  {"I16", 2},
                                                                  {"I8", 1},
                                                                  {"U64", 8},
                                                                  {"U32", 4},
                                                                  {"U16", 2},
                                                                  {"U8", 1},
                                                                  {"BOOL", 1},
                                                                  {"F8_E4M3", 1}}};

std::string dtype_names() {
  std::string names;
  for (const auto& [name, bytes] : dtypes) names += fmt::format("{}{}", names.empty() ? "" : " ", name);
  return names;
}

// A hostile header may hold megabytes in one value; show its beginning.
std::string brief(const Json& value) {
  std::string text = value.dump(-1, ' ', true, Json::error_handler_t::replace);
  return text.size() > 80 ? text.substr(0, 80) + "..." : text;
}

// Parses the header, refusing what a JSON library would quietly mend: names given twice, and nesting without end.
Json parse_header(const std::string& path, const std::string& text) {
  std::vector<std::set<std::string>> seen;
  const auto watch = [&](int depth, Json::parse_event_t event, Json& value) {
    if (depth > 4) throw invalid("{}: header: nested deeper than the format has it; write the file again", path);
    if (event != Json::parse_event_t::key) return true;
    // Keys of one object come at one depth; deeper objects have ended by then.
    seen.resize(static_cast<size_t>(depth));
    if (!seen.back().insert(value.get<std::string>()).second)
      throw invalid("{}: header: the name {} is given twice; a name belongs to one tensor", path, brief(value));
    return true;
  };
  try {
    Json header = Json::parse(text, watch);
    if (header.is_object()) return header;
  } catch (const Json::exception& error) {
    const auto* syntax = dynamic_cast<const Json::parse_error*>(&error);  // its text would quote the file's bytes
    throw invalid("{}: header: not JSON{}; it must be one JSON object: is this a safetensors file?", path,
                  syntax ? fmt::format(" at byte {}", syntax->byte) : "");
  }
  throw invalid("{}: header: not an object; it must be one JSON object: is this a safetensors file?", path);
}

int64_t whole(const Json& value, const std::string& where, const char* what) {
  if (!value.is_number_unsigned() || value.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX))
    throw invalid("{}: {} has {}; it must be whole numbers from 0 to 2^63-1", where, what, brief(value));
  return value.get<int64_t>();
}

FileTensor parse_tensor(const Json& entry, const std::string& where, int64_t data_bytes) {
  for (const char* field : {"dtype", "shape", "data_offsets"})
    if (!entry.is_object() || !entry.contains(field))
      throw invalid("{}: is {}; it must have dtype, shape and data_offsets", where, brief(entry));
  const Json &dtype = entry["dtype"], &shape = entry["shape"], &offsets = entry["data_offsets"];
  FileTensor tensor;

  const auto row = std::find_if(dtypes.begin(), dtypes.end(), [&](const auto& known) { return dtype == known.first; });
  if (row == dtypes.end()) throw invalid("{}: dtype is {}; it must be one of {}", where, brief(dtype), dtype_names());
  tensor.dtype = row->first;

  if (!shape.is_array()) throw invalid("{}: shape is {}; it must be a list", where, brief(shape));
  std::optional<int64_t> bytes = row->second;
  for (const Json& extent : shape) {
    tensor.shape.push_back(whole(extent, where, "shape"));
    bytes = checked_mul(bytes, tensor.shape.back());
  }
  // A zero hides an overflow only if it stands first; either way the product is then 0.
  if (std::count(tensor.shape.begin(), tensor.shape.end(), 0) != 0) bytes = 0;
  if (!bytes) throw invalid("{}: shape {} of {} takes more than 2^63 bytes", where, brief(shape), tensor.dtype);

  if (!offsets.is_array() || offsets.size() != 2)
    throw invalid("{}: data_offsets is {}; it must be [begin, end]", where, brief(offsets));
  tensor.begin = whole(offsets[0], where, "data_offsets");
  tensor.end = whole(offsets[1], where, "data_offsets");
  if (tensor.begin > tensor.end)
    throw invalid("{}: data_offsets is {}; begin must not be above end", where, brief(offsets));
  if (tensor.end > data_bytes)
    throw invalid("{}: data_offsets is {}; the file holds {} bytes of data: it is cut short or the header lies", where,
                  brief(offsets), data_bytes);
  if (tensor.end - tensor.begin != *bytes)
    throw invalid("{}: data_offsets {} span {} bytes; shape {} of {} takes {}", where, brief(offsets),
                  tensor.end - tensor.begin, brief(shape), tensor.dtype, *bytes);
  return tensor;
}

// The format leaves no byte unowned and none owned twice, so that no file can mean two things.
void check_tiling(const std::string& path, const std::map<std::string, FileTensor>& tensors, int64_t data_bytes) {
  std::vector<std::pair<const FileTensor*, const std::string*>> order;
  for (const auto& [name, tensor] : tensors) order.emplace_back(&tensor, &name);
  std::sort(order.begin(), order.end(), [](const auto& a, const auto& b) {
    return std::pair(a.first->begin, a.first->end) < std::pair(b.first->begin, b.first->end);
  });
  int64_t covered = 0;
  for (const auto& [tensor, name] : order) {
    if (tensor->begin != covered)
      throw invalid("{}: tensor {}: begins at byte {}; the bytes before it end at {}: no {} is allowed", path,
                    brief(*name), tensor->begin, covered, tensor->begin < covered ? "overlap" : "hole");
    covered = tensor->end;
  }
  if (covered != data_bytes)
    throw invalid("{}: {} bytes follow the last tensor; no hole is allowed", path, data_bytes - covered);
}

}  // namespace

std::string shape_text(const std::vector<int64_t>& shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

TensorFile::TensorFile(const std::string& path) : path_(path) {
  int64_t bytes = 0;
  const File file = open_file(path, bytes);
  std::array<unsigned char, 8> prefix{};
  if (std::fread(prefix.data(), 1, prefix.size(), file.get()) != prefix.size())
    throw invalid("{}: has {} bytes; a safetensors file begins with 8 bytes of header length", path, bytes);
  uint64_t length = 0;
  for (size_t n = 0; n < prefix.size(); ++n) length |= static_cast<uint64_t>(prefix[n]) << (8 * n);
  const int64_t most = std::min(header_limit, bytes - 8);
  if (length > static_cast<uint64_t>(most))
    throw invalid("{}: header length is {}; it may be at most {}: is this a safetensors file?", path, length, most);

  std::string text(static_cast<size_t>(length), '\0');
  if (std::fread(text.data(), 1, text.size(), file.get()) != text.size())
    throw invalid("{}: cannot read its header of {} bytes", path, length);
  data_begin_ = 8 + static_cast<int64_t>(length);

  const Json header = parse_header(path, text);
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") {
      const bool strings = entry.is_object() &&
                           std::all_of(entry.begin(), entry.end(), [](const Json& value) { return value.is_string(); });
      if (!strings) throw invalid("{}: __metadata__ is {}; it must map names to strings", path, brief(entry));
      continue;
    }
    tensors_[name] = parse_tensor(entry, fmt::format("{}: tensor {}", path, brief(name)), bytes - data_begin_);
  }
  check_tiling(path, tensors_, bytes - data_begin_);
}

const FileTensor& TensorFile::at(const std::string& name) const {
  const auto found = tensors_.find(name);
  if (found != tensors_.end()) return found->second;
  std::string names;
  for (const auto& [other, tensor] : tensors_) {
    if (names.size() > 200) {
      names += ", ...";
      break;
    }
    names += (names.empty() ? "" : ", ") + other;
  }
  throw invalid("{}: tensor {} is missing; the file has: {}", path_, name, names.empty() ? "none" : names);
}

std::vector<std::byte> TensorFile::read(const std::string& name) const {
  const FileTensor& tensor = at(name);
  int64_t bytes = 0;
  const File file = open_file(path_, bytes);
  std::vector<std::byte> data(static_cast<size_t>(tensor.end - tensor.begin));
  if (::fseeko(file.get(), data_begin_ + tensor.begin, SEEK_SET) != 0 ||
      std::fread(data.data(), 1, data.size(), file.get()) != data.size())
    throw invalid("{}: tensor {}: cannot read its {} bytes; has the file changed?", path_, name, data.size());
  return data;
}

void write_tensors(const std::string& path, const std::vector<OwnedTensor>& tensors,
                   const std::map<std::string, std::string>& metadata) {
  Json header = Json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  size_t offset = 0;
  for (const OwnedTensor& tensor : tensors) {
    header[tensor.name] = {
        {"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {offset, offset + tensor.bytes.size()}}};
    offset += tensor.bytes.size();
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');  // so that the data are aligned in a mapped file

  std::array<unsigned char, 8> prefix{};
  for (size_t n = 0; n < prefix.size(); ++n) prefix[n] = static_cast<unsigned char>(text.size() >> (8 * n));
  write_file(path, [&](std::FILE* file) {
    std::fwrite(prefix.data(), 1, prefix.size(), file);
    std::fwrite(text.data(), 1, text.size(), file);
    for (const OwnedTensor& tensor : tensors) std::fwrite(tensor.bytes.data(), 1, tensor.bytes.size(), file);
  });  // write_file looks at the stream's error flag once, at the end
}

}  // namespace tessera::tools
